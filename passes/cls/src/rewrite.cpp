// Uses of state in functions become the address in the current instance.
#include "cls.h"

#include "llvm/IR/DiagnosticInfo.h"
#include "llvm/IR/InlineAsm.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/Instructions.h"
#include "llvm/IR/IntrinsicInst.h"
#include "llvm/IR/Intrinsics.h"

#include <map>

using namespace llvm;

namespace orrery {

namespace {

class Rewriter {
  public:
    Rewriter(Module &M, Selection &Chosen)
        : M(M), Chosen(Chosen), Word(Type::getInt64Ty(M.getContext())), Byte(Type::getInt8Ty(M.getContext())),
          BytePointer(PointerType::getUnqual(Byte)) {}

    void rewrite(Function &F);

  private:
    Value *delta(IRBuilder<> &B);
    Value *threadBlock(IRBuilder<> &B);
    Value *addressOf(GlobalVariable *G, IRBuilder<> &B);
    Value *expand(Constant *C, Instruction *At);
    bool check(Instruction &I, unsigned Operand);

    Module &M;
    Selection &Chosen;
    Type *Word, *Byte;
    PointerType *BytePointer;
};

/// The distance to the current instance. It does not change while a function of the library runs: who enters another
/// instance in a callback leaves it before the callback returns.
Value *Rewriter::delta(IRBuilder<> &B) {
    auto *Thread = M.getGlobalVariable(ThreadWord);
    if (!Thread) {
        Thread = new GlobalVariable(M, Word, false, GlobalValue::ExternalLinkage, nullptr, ThreadWord,
                                    nullptr, GlobalValue::InitialExecTLSModel);
        Thread->setVisibility(GlobalValue::HiddenVisibility);
        Thread->setDSOLocal(true);
    }
    auto *Load = B.CreateAlignedLoad(Word, Thread, Align(8), "cls");
    Load->setMetadata(LLVMContext::MD_invariant_load, MDNode::get(M.getContext(), {}));
    return Load;
}

/// The thread-local variables of this thread in the current instance: an address, as an integer.
Value *Rewriter::threadBlock(IRBuilder<> &B) {
    auto *Of = FunctionType::get(Word, false);
    auto Callee = M.getOrInsertFunction("__orrery_cls_thread_block", Of);
    if (auto *F = dyn_cast<Function>(Callee.getCallee())) {
        F->setVisibility(GlobalValue::HiddenVisibility);
        F->setDSOLocal(true);
        F->setDoesNotThrow();
    }
    return B.CreateCall(Callee, {}, "cls.thread");
}

Value *Rewriter::addressOf(GlobalVariable *G, IRBuilder<> &B) {
    if (Chosen.isThreadLocal(G)) {
        // The block is a copy of the section: what is added is the offset in it.
        auto *Start = cast<GlobalVariable>(M.getOrInsertGlobal("__start_orrery_cls_tls", Byte));
        Start->setVisibility(GlobalValue::HiddenVisibility);
        Start->setDSOLocal(true);
        auto *Offset = B.CreateSub(B.CreatePtrToInt(G, Word), B.CreatePtrToInt(Start, Word));
        return B.CreateIntToPtr(B.CreateAdd(threadBlock(B), Offset), G->getType());
    }
    // The addition is one of integers: as a part of the variable's own object it would be undefined, and the optimizer
    // would be free to take a variable that nobody but other instances writes for a constant.
    if (!Chosen.isForeign(G))
        return B.CreateIntToPtr(B.CreateAdd(B.CreatePtrToInt(G, Word), delta(B)), G->getType());
    // Where another unit of this library moved it, that is the address to add to; else it is nobody's state.
    std::string Name = movedName(G->getName());
    auto *Inside = M.getGlobalVariable(Name);
    if (!Inside) {
        Inside = new GlobalVariable(M, Byte, false, GlobalValue::ExternalWeakLinkage, nullptr, Name);
        Inside->setVisibility(GlobalValue::HiddenVisibility);
    }
    auto *Address = B.CreatePtrToInt(Inside, Word);
    auto *There = B.CreateICmpNE(Inside, ConstantPointerNull::get(Inside->getType()));
    auto *Of = B.CreateSelect(There, B.CreateAdd(Address, delta(B)), B.CreatePtrToInt(G, Word));
    return B.CreateIntToPtr(Of, G->getType());
}

/// Returns the constant as instructions before `At`, with every address of state replaced.
Value *Rewriter::expand(Constant *C, Instruction *At) {
    IRBuilder<> B(At);
    if (auto *G = dyn_cast<GlobalVariable>(C))
        return addressOf(G, B);
    if (auto *A = dyn_cast<GlobalAlias>(C)) {
        auto *Of = expand(A->getAliasee(), At);
        return Of->getType() == A->getType() ? Of : B.CreateBitCast(Of, A->getType());
    }
    if (auto *E = dyn_cast<ConstantExpr>(C)) {
        auto *I = E->getAsInstruction();
        I->insertBefore(At);
        I->setDebugLoc(At->getDebugLoc());
        for (unsigned K = 0; K < I->getNumOperands(); ++K)
            if (auto *Operand = dyn_cast<Constant>(I->getOperand(K)))
                if (Chosen.refers(Operand))
                    I->setOperand(K, expand(Operand, I));
        return I;
    }
    Value *Whole = UndefValue::get(C->getType());
    for (unsigned K = 0; K < C->getNumOperands(); ++K) {
        auto *Member = cast<Constant>(C->getOperand(K));
        Value *Of = Chosen.refers(Member) ? expand(Member, At) : Member;
        Whole =
            isa<ConstantVector>(C) ? B.CreateInsertElement(Whole, Of, K) : B.CreateInsertValue(Whole, Of, K);
    }
    return Whole;
}

/// Whether this operand can be replaced; reports it if not.
bool Rewriter::check(Instruction &I, unsigned Operand) {
    auto *Call = dyn_cast<CallBase>(&I);
    if (!Call)
        return true;
    if (auto *Asm = dyn_cast<InlineAsm>(Call->getCalledOperand())) {
        // Outputs by value have no operand.
        unsigned At = 0;
        for (auto &Constraint : Asm->ParseConstraints()) {
            if (Constraint.Type == InlineAsm::isClobber ||
                (Constraint.Type == InlineAsm::isOutput && !Constraint.isIndirect))
                continue;
            if (At++ != Operand)
                continue;
            for (auto &Code : Constraint.Codes)
                if (Code == "i" || Code == "s" || Code == "n" || Code == "X") {
                    reportError(
                        I, "cannot move a variable to compartment-local storage: assembly code wants its "
                           "address as a constant; mark the variable cls_shared");
                    return false;
                }
        }
    }
    if (isa<IntrinsicInst>(Call) && Call->paramHasAttr(Operand, Attribute::ImmArg)) {
        reportError(
            I, "cannot move a variable to compartment-local storage: its address must be a constant here; "
               "mark the variable cls_shared");
        return false;
    }
    return true;
}

void Rewriter::rewrite(Function &F) {
    std::vector<std::pair<Instruction *, unsigned>> Uses;
    std::vector<IntrinsicInst *> ThreadAddresses;
    for (auto &I : instructions(F)) {
#if LLVM_VERSION_MAJOR >= 16
        if (auto *Intrinsic = dyn_cast<IntrinsicInst>(&I))
            if (Intrinsic->getIntrinsicID() == Intrinsic::threadlocal_address)
                if (auto *G = dyn_cast<GlobalVariable>(Intrinsic->getArgOperand(0)->stripPointerCasts()))
                    if (Chosen.isThreadLocal(G)) {
                        ThreadAddresses.push_back(Intrinsic);
                        continue;
                    }
#endif
        if (isa<LandingPadInst>(I))
            continue;
        for (unsigned K = 0; K < I.getNumOperands(); ++K)
            if (auto *C = dyn_cast<Constant>(I.getOperand(K)))
                if (Chosen.refers(C) && check(I, K))
                    Uses.push_back({&I, K});
    }
    for (auto *Intrinsic : ThreadAddresses) {
        IRBuilder<> B(Intrinsic);
        auto *Of = addressOf(cast<GlobalVariable>(Intrinsic->getArgOperand(0)->stripPointerCasts()), B);
        Intrinsic->replaceAllUsesWith(Of);
        Intrinsic->eraseFromParent();
    }
    // One predecessor may come several times in a phi, each time with the same value.
    std::map<std::pair<PHINode *, BasicBlock *>, Value *> Incoming;
    for (auto &[I, K] : Uses) {
        auto *C = cast<Constant>(I->getOperand(K));
        auto *Phi = dyn_cast<PHINode>(I);
        if (!Phi) {
            I->setOperand(K, expand(C, I));
            continue;
        }
        auto *From = Phi->getIncomingBlock(K);
        auto &Of = Incoming[{Phi, From}];
        if (!Of)
            Of = expand(C, From->getTerminator());
        Phi->setIncomingValue(K, Of);
    }
}

/// Whether the text has the name as a word of its own.
bool mentions(StringRef Text, StringRef Name) {
    auto IsPart = [](char C) {
        return isalnum(static_cast<unsigned char>(C)) || C == '_' || C == '.' || C == '$';
    };
    for (size_t At = Text.find(Name); At != StringRef::npos; At = Text.find(Name, At + 1)) {
        bool Begins = At == 0 || !IsPart(Text[At - 1]);
        size_t End = At + Name.size();
        if (Begins && (End >= Text.size() || !IsPart(Text[End])))
            return true;
    }
    return false;
}

void checkAssembly(Module &M, Selection &Chosen) {
    for (auto *Variables : {&Chosen.moved(), &Chosen.threadLocal()})
        for (auto *G : *Variables)
            if (G->hasName() && mentions(M.getModuleInlineAsm(), G->getName()))
                reportError(M, *G, "assembly code at file scope uses it");
    for (auto &F : M)
        for (auto &I : instructions(F)) {
            auto *Call = dyn_cast<CallBase>(&I);
            auto *Asm = Call ? dyn_cast<InlineAsm>(Call->getCalledOperand()) : nullptr;
            if (!Asm)
                continue;
            for (auto *Variables : {&Chosen.moved(), &Chosen.threadLocal()})
                for (auto *G : *Variables)
                    if (G->hasName() && mentions(Asm->getAsmString(), G->getName()))
                        reportError(
                            I, "cannot move variable " + G->getName() +
                                   " to compartment-local storage: assembly code uses it by name; mark it "
                                   "cls_shared");
        }
}

} // namespace

void reportError(const Instruction &At, const Twine &Message) {
    auto *F = const_cast<Function *>(At.getFunction());
    F->getContext().diagnose(DiagnosticInfoUnsupported(*F, Message, At.getDebugLoc()));
}

void reportError(const Module &M, const GlobalValue &Of, const Twine &Message) {
    M.getContext().emitError(M.getSourceFileName() + ": cannot move variable " + Of.getName() +
                             " to compartment-local storage: " + Message + "; mark it cls_shared");
}

void rewriteUses(Module &M, Selection &Chosen) {
    checkAssembly(M, Chosen);
    Rewriter Rewrites(M, Chosen);
    // A function may be made while others are rewritten.
    std::vector<Function *> Functions;
    for (auto &F : M)
        if (!F.isDeclaration())
            Functions.push_back(&F);
    for (auto *F : Functions)
        Rewrites.rewrite(*F);
}

} // namespace orrery
