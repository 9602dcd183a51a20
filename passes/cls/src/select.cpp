// Which variables are state: writable ones, and constants that point to state, to a fixpoint.
#include "cls.h"

#include "llvm/IR/DebugInfoMetadata.h"

#include <cstdlib>

using namespace llvm;

namespace orrery {

namespace {

/// Type information and virtual tables: they point to functions and to each other, never to state.
bool isTypeInformation(StringRef Name) {
    for (StringRef Prefix : {"_ZTV", "_ZTI", "_ZTS", "_ZTT", "_ZTC"})
        if (hasPrefix(Name, Prefix))
            return true;
    return false;
}

/// Names to which the compiler gives a meaning.
bool isReserved(StringRef Name) {
    if (Name == "__dso_handle" || isMovedName(Name))
        return true;
    for (StringRef Prefix : {"llvm.", "__start_", "__stop_", "__orrery_cls", "__sanitizer", "__asan_",
                             "__ubsan", "__llvm_prof", "__profc_", "__profd_", "__emutls"})
        if (hasPrefix(Name, Prefix))
            return true;
    return false;
}

/// Names of addresses that the linker defines, where no unit does.
bool isOfLinker(StringRef Name) {
    for (StringRef Known : {"_GLOBAL_OFFSET_TABLE_", "_DYNAMIC", "_end", "end", "_edata", "edata", "_etext",
                            "etext", "__bss_start", "__ehdr_start"})
        if (Name == Known)
            return true;
    return false;
}

} // namespace

bool Selection::canMove(const GlobalVariable &G) const {
    return !G.isDeclaration() && !G.hasAvailableExternallyLinkage() && !G.isThreadLocal() &&
           !isReserved(G.getName()) && !isTypeInformation(G.getName()) &&
           !Shared.count(const_cast<GlobalVariable *>(&G));
}

bool Selection::isForeign(const GlobalVariable *G) const {
    return (G->isDeclaration() || G->hasAvailableExternallyLinkage()) && !G->isThreadLocal() &&
           G->hasName() && !isReserved(G->getName()) && !isOfLinker(G->getName()) &&
           !isTypeInformation(G->getName()) && !Shared.count(const_cast<GlobalVariable *>(G));
}

void Selection::readAnnotations(Module &M) {
    if (auto *Annotations = M.getGlobalVariable("llvm.global.annotations"))
        if (auto *List = dyn_cast<ConstantArray>(Annotations->getInitializer()))
            for (auto &Entry : List->operands()) {
                auto *Fields = dyn_cast<ConstantStruct>(Entry);
                if (!Fields)
                    continue;
                auto *G = dyn_cast<GlobalVariable>(Fields->getOperand(0)->stripPointerCasts());
                auto *Text = dyn_cast<GlobalVariable>(Fields->getOperand(1)->stripPointerCasts());
                if (!G || !Text || !Text->hasInitializer())
                    continue;
                auto *Bytes = dyn_cast<ConstantDataSequential>(Text->getInitializer());
                if (Bytes && Bytes->isCString() && Bytes->getAsCString() == SharedAnnotation)
                    Shared.insert(G);
            }
    // Sources that must stay as they are: names from the command line of the driver.
    const char *Names = std::getenv("ORRERY_CLS_SHARED");
    SmallVector<StringRef, 8> List;
    StringRef(Names ? Names : "").split(List, ':', -1, false);
    for (auto &G : M.globals())
        for (StringRef Name : List)
            if (G.getName() == Name)
                Shared.insert(&G);
}

bool Selection::pointsToState(Constant *C, DenseMap<Constant *, bool> &Seen) {
    auto Found = Seen.find(C);
    if (Found != Seen.end())
        return Found->second;
    bool Points = false;
    if (auto *G = dyn_cast<GlobalVariable>(C)) {
        Points = Moved.count(G) || ThreadLocal.count(G) || isForeign(G);
    } else if (auto *A = dyn_cast<GlobalAlias>(C)) {
        Points = pointsToState(A->getAliasee(), Seen);
    } else if (!isa<GlobalValue>(C) && !isa<BlockAddress>(C)) {
        for (auto &Operand : C->operands())
            if (auto *Inner = dyn_cast<Constant>(Operand))
                if (pointsToState(Inner, Seen)) {
                    Points = true;
                    break;
                }
    }
    Seen[C] = Points;
    return Points;
}

bool Selection::refers(Constant *C) { return pointsToState(C, Known); }

Selection::Selection(Module &M) {
    readAnnotations(M);
    for (auto &G : M.globals()) {
        if (canMove(G) && !G.isConstant())
            Moved.insert(&G);
        if (G.isThreadLocal() && !isReserved(G.getName()) && !Shared.count(&G))
            ThreadLocal.insert(&G);
    }
    for (bool More = true; More;) {
        More = false;
        DenseMap<Constant *, bool> Seen;
        for (auto &G : M.globals())
            if (canMove(G) && !Moved.count(&G) && G.hasInitializer() &&
                pointsToState(G.getInitializer(), Seen)) {
                Moved.insert(&G);
                More = true;
                Seen.clear();
            }
    }
}

} // namespace orrery
