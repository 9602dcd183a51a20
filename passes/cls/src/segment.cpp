// Loads and stores of state as accesses relative to GS.
#include "cls.h"

#include "llvm/IR/InstIterator.h"
#include "llvm/IR/Instructions.h"
#include "llvm/Transforms/Utils/Local.h"

#include <cstdlib>

using namespace llvm;

namespace orrery {

namespace {

/// The address space whose accesses have a GS prefix.
constexpr unsigned Segment = 256;
/// The widest access that is one of a vector register.
constexpr uint64_t WidestVector = 64;

/// An access to memory, by the operand that is its address.
struct Access {
    unsigned Operand;
    Type *Of;
    Align Alignment;
};

/// Returns what the instruction accesses; without a type where that is nothing.
Access accessOf(const Instruction &I) {
    if (auto *Load = dyn_cast<LoadInst>(&I))
        return {LoadInst::getPointerOperandIndex(), Load->getType(), Load->getAlign()};
    if (auto *Store = dyn_cast<StoreInst>(&I))
        return {StoreInst::getPointerOperandIndex(), Store->getValueOperand()->getType(), Store->getAlign()};
    if (auto *Change = dyn_cast<AtomicRMWInst>(&I))
        return {AtomicRMWInst::getPointerOperandIndex(), Change->getValOperand()->getType(),
                Change->getAlign()};
    if (auto *Exchange = dyn_cast<AtomicCmpXchgInst>(&I))
        return {AtomicCmpXchgInst::getPointerOperandIndex(), Exchange->getNewValOperand()->getType(),
                Exchange->getAlign()};
    return {0, nullptr, Align()};
}

/// Whether the backend makes instructions of the access, rather than a call, which needs an ordinary address.
bool isInstruction(const DataLayout &Layout, const Instruction &I, const Access &Found) {
    auto Size = Layout.getTypeStoreSize(Found.Of);
    if (!Found.Of->isSingleValueType() || Size.isScalable())
        return false;
    uint64_t Bytes = Size.getFixedValue();
    return I.isAtomic() ? Bytes <= 8 && Found.Alignment.value() >= Bytes : Bytes <= WidestVector;
}

/// Whether the value is the distance, as rewriteUses loads it.
bool isDistance(const Value *V) {
    auto *Load = dyn_cast<LoadInst>(V);
    auto *G = Load ? dyn_cast<GlobalVariable>(Load->getPointerOperand()->stripPointerCasts()) : nullptr;
    return G && G->getName() == ThreadWord;
}

/// The address as one that is relative to GS; null where it is not that of a variable, at an offset that is a constant, plus
/// the distance.
///
/// It is a constant made of integers, so optimizers know of no object behind it, and make no memset or memcpy of
/// several such accesses: those are calls, which need ordinary addresses.
Constant *relative(const DataLayout &Layout, Value *Address) {
    auto *Pointer = cast<PointerType>(Address->getType());
    if (Pointer->getAddressSpace() != 0)
        return nullptr;
    auto *Word = cast<IntegerType>(Layout.getIntPtrType(Pointer));
    APInt Offset(Word->getBitWidth(), 0);
    auto *Cast = dyn_cast<IntToPtrInst>(Address->stripAndAccumulateConstantOffsets(Layout, Offset, true));
    auto *Sum = Cast ? dyn_cast<BinaryOperator>(Cast->getOperand(0)) : nullptr;
    if (!Sum || Sum->getOpcode() != Instruction::Add || Sum->getType() != Word)
        return nullptr;
    bool IsFirst = isDistance(Sum->getOperand(0));
    auto *Start = dyn_cast<Constant>(Sum->getOperand(IsFirst ? 1 : 0));
    if (!Start || !(IsFirst || isDistance(Sum->getOperand(1))))
        return nullptr;
    if (!Offset.isZero())
        Start = ConstantExpr::getAdd(Start, ConstantInt::get(Word, Offset));
#if LLVM_VERSION_MAJOR >= 17
    auto *Type = PointerType::get(Pointer->getContext(), Segment);
#else
    auto *Type = PointerType::getWithSamePointeeType(Pointer, Segment);
#endif
    return ConstantExpr::getIntToPtr(Start, Type);
}

} // namespace

bool usesSegment() {
    const char *Base = std::getenv("ORRERY_CLS_BASE");
    return Base && StringRef(Base) == "gs";
}

void rejectSegment(Module &M) {
    for (auto &F : M)
        for (auto &I : instructions(F)) {
            auto Found = accessOf(I);
            if (Found.Of && I.getOperand(Found.Operand)->getType()->getPointerAddressSpace() == Segment) {
                reportError(I,
                            "cannot find instances by GS: the source uses GS itself; unset ORRERY_CLS_BASE");
                return;
            }
        }
}

void rewriteAccesses(Module &M) {
    auto &Layout = M.getDataLayout();
    SmallVector<WeakTrackingVH, 32> Replaced;
    for (auto &F : M)
        for (auto &I : instructions(F)) {
            auto Found = accessOf(I);
            if (!Found.Of || !isInstruction(Layout, I, Found))
                continue;
            auto *Address = I.getOperand(Found.Operand);
            if (auto *Relative = relative(Layout, Address)) {
                I.setOperand(Found.Operand, Relative);
                Replaced.push_back(Address);
            }
        }
    RecursivelyDeleteTriviallyDeadInstructionsPermissive(Replaced);
    // A declaration that nothing uses is a symbol of no type, which the linker refuses to take for the thread-local one.
    if (auto *Thread = M.getGlobalVariable(ThreadWord))
        if (Thread->use_empty())
            Thread->eraseFromParent();
}

} // namespace orrery
