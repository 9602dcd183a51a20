// Sections and names of variables; the record of the unit.
#include "cls.h"

#include "llvm/Transforms/Utils/ModuleUtils.h"

using namespace llvm;

namespace orrery {

namespace {

/// Whether its bytes are all zero in the file, so that they need no room there.
bool isZero(const GlobalVariable &G) { return G.getInitializer()->isNullValue(); }

/// A section by name has room in the file even for zeros, unless it is given as #pragma clang section does.
void putInto(GlobalVariable &G, const char *Data, const char *Bss) {
    G.setSection("");
    if (Bss && isZero(G))
        G.addAttribute("bss-section", Bss);
    else
        G.setSection(Data);
}

void place(Module &M, GlobalVariable &G, const char *Data, const char *Bss) {
    if (G.hasSection() && !hasPrefix(G.getSection(), ".data") && !hasPrefix(G.getSection(), ".bss")) {
        reportError(M, G, "it is in section " + G.getSection() + " by request");
        return;
    }
    // A common symbol has no section; a weak one is as good.
    if (G.hasCommonLinkage())
        G.setLinkage(GlobalValue::WeakAnyLinkage);
    G.setConstant(false);
    putInto(G, Data, Bss);
    // Equal addresses are what makes two variables one.
    G.setUnnamedAddr(GlobalValue::UnnamedAddr::None);
}

/// Gives the variable a second name that nothing outside of the library can preempt.
GlobalAlias *nameInside(Module &M, GlobalVariable &G) {
    auto *Type = cast<PointerType>(G.getType());
    auto *Alias = GlobalAlias::create(G.getValueType(), Type->getAddressSpace(),
                                      G.hasExternalLinkage() ? GlobalValue::ExternalLinkage
                                                             : GlobalValue::WeakAnyLinkage,
                                      movedName(G.getName()), &G, &M);
    Alias->setVisibility(GlobalValue::HiddenVisibility);
    Alias->setDSOLocal(true);
    return Alias;
}

} // namespace

void placeVariables(Module &M, Selection &Chosen) {
    for (auto *G : Chosen.moved()) {
        place(M, *G, DataSection, BssSection);
        if (G->hasLocalLinkage())
            continue;
        auto *Inside = nameInside(M, *G);
        // Functions use that name: the public one may be preempted by the main program's copy (R_X86_64_COPY).
        G->replaceUsesWithIf(Inside, [](Use &U) { return isa<Instruction>(U.getUser()); });
        std::vector<ConstantExpr *> Expressions;
        for (auto *U : G->users())
            if (auto *E = dyn_cast<ConstantExpr>(U))
                Expressions.push_back(E);
        for (auto *E : Expressions)
            if (E->getOpcode() == Instruction::PtrToInt || E->getOpcode() == Instruction::BitCast)
                E->replaceAllUsesWith(ConstantExpr::getCast(E->getOpcode(), Inside, E->getType()));
        for (auto &A : M.aliases())
            if (&A != Inside && A.getAliasee() == Inside)
                A.setAliasee(G);
    }
    for (auto &A : M.aliases()) {
        auto *G = dyn_cast_or_null<GlobalVariable>(A.getAliaseeObject());
        if (!G || !Chosen.isMoved(G) || A.hasLocalLinkage() || isMovedName(A.getName()))
            continue;
        auto *Inside = GlobalAlias::create(A.getValueType(), A.getAddressSpace(), A.getLinkage(),
                                           movedName(A.getName()), A.getAliasee(), &M);
        Inside->setVisibility(GlobalValue::HiddenVisibility);
        Inside->setDSOLocal(true);
    }
    for (auto *G : Chosen.threadLocal()) {
        G->setThreadLocal(false);
        if (G->isDeclaration())
            continue;
        // Its bytes are copied for each thread, so they have to be in one section, zero or not.
        place(M, *G, ThreadSection, nullptr);
        G->setDSOLocal(true);
        if (!G->hasLocalLinkage())
            G->setVisibility(GlobalValue::HiddenVisibility);
    }
    for (auto *G : Chosen.shared())
        if (!G->isDeclaration() && !G->isConstant() && !G->isThreadLocal() && !G->hasSection() &&
            !G->hasCommonLinkage())
            putInto(*G, SharedSection, SharedBssSection);
}

void recordUnit(Module &M, const Selection &Chosen) {
    auto &Context = M.getContext();
    auto *Half = Type::getInt32Ty(Context);
    auto *Word = Type::getInt64Ty(Context);
    uint64_t Alignment = 16;
    for (auto *Variables : {&Chosen.moved(), &Chosen.threadLocal()})
        for (auto *G : *Variables)
            if (!G->isDeclaration())
                Alignment = std::max(Alignment, M.getDataLayout().getPreferredAlign(G).value());
    // The highest bit is another member: see runtime/cls.h.
    if (usesSegment())
        Alignment |= uint64_t(1) << 31;
    // The reference has the linker take the runtime from its archive.
    auto *Descriptor = cast<GlobalVariable>(M.getOrInsertGlobal("orrery_cls_descriptor", Half));
    auto *Record = StructType::get(Half, Half);
    auto *Unit =
        new GlobalVariable(M, Record, true, GlobalValue::InternalLinkage, nullptr, "__orrery_cls_unit");
    auto *Distance = ConstantExpr::getTrunc(ConstantExpr::getSub(ConstantExpr::getPtrToInt(Descriptor, Word),
                                                                 ConstantExpr::getPtrToInt(Unit, Word)),
                                            Half);
    Descriptor->setVisibility(GlobalValue::ProtectedVisibility);
    Descriptor->setDSOLocal(true);
    Unit->setInitializer(ConstantStruct::get(Record, {ConstantInt::get(Half, Alignment), Distance}));
    Unit->setSection(UnitSection);
    Unit->setAlignment(Align(4));
    appendToUsed(M, {Unit});
}

} // namespace orrery
