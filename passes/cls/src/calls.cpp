// Calls whose effect belongs to an instance: allocation, threads, functions at exit; constructors and destructors.
#include "cls.h"

#include "llvm/Transforms/Utils/ModuleUtils.h"

using namespace llvm;

namespace orrery {

namespace {

/// Functions of the C library in whose place the runtime has one of its own (runtime/*.c).
const char *const Heap[] = {
    "malloc",  "calloc", "realloc",  "free",    "posix_memalign", "aligned_alloc",      "memalign",
    "valloc",  "strdup", "__strdup", "strndup", "reallocarray",   "malloc_usable_size", "getline",
    "getdelim"};
const char *const Process[] = {"atexit",
                               "__cxa_atexit",
                               "__cxa_thread_atexit",
                               "pthread_create",
                               "pthread_key_create",
                               "__pthread_key_create",
                               "pthread_key_delete",
                               "pthread_getspecific",
                               "pthread_setspecific",
                               "tss_create",
                               "tss_delete",
                               "tss_get",
                               "tss_set"};

void redirect(Module &M, StringRef Name) {
    auto *F = M.getFunction(Name);
    // Who defines such a function is an allocator, or has a reason.
    if (!F || !F->isDeclaration())
        return;
    std::string To = ("__orrery_cls_" + Name.ltrim('_')).str();
    auto *Own = cast<Function>(M.getOrInsertFunction(To, F->getFunctionType()).getCallee());
    Own->copyAttributesFrom(F);
    Own->setVisibility(GlobalValue::HiddenVisibility);
    Own->setDSOLocal(true);
    F->replaceAllUsesWith(Own);
}

void collect(Module &M, StringRef List, const char *Section) {
    auto *All = M.getGlobalVariable(List);
    if (!All || !All->hasInitializer())
        return;
    auto *Half = Type::getInt32Ty(M.getContext());
    auto *Word = Type::getInt64Ty(M.getContext());
    auto *Record = StructType::get(Half, Half);
    SmallVector<GlobalValue *, 8> Records;
    if (auto *Entries = dyn_cast<ConstantArray>(All->getInitializer()))
        for (auto &Entry : Entries->operands()) {
            auto *Fields = dyn_cast<ConstantStruct>(Entry);
            auto *F = Fields ? dyn_cast<Function>(Fields->getOperand(1)->stripPointerCasts()) : nullptr;
            if (!F)
                continue;
            auto *Of = new GlobalVariable(M, Record, true, GlobalValue::InternalLinkage, nullptr,
                                          "__orrery_cls_constructor");
            auto *Distance = ConstantExpr::getTrunc(
                ConstantExpr::getSub(ConstantExpr::getPtrToInt(F, Word), ConstantExpr::getPtrToInt(Of, Word)),
                Half);
            Of->setInitializer(
                ConstantStruct::get(Record, {cast<Constant>(Fields->getOperand(0)), Distance}));
            Of->setSection(Section);
            Of->setAlignment(Align(4));
            // Where the linker drops the function, as one of several, it drops this.
            if (auto *C = F->getComdat())
                Of->setComdat(C);
            Records.push_back(Of);
        }
    All->eraseFromParent();
    appendToUsed(M, Records);
}

} // namespace

void redirectCalls(Module &M) {
    if (!std::getenv("ORRERY_CLS_PROCESS_HEAP"))
        for (auto *Name : Heap)
            redirect(M, Name);
    for (auto *Name : Process)
        redirect(M, Name);
}

void collectConstructors(Module &M) {
    collect(M, "llvm.global_ctors", ConstructorSection);
    collect(M, "llvm.global_dtors", DestructorSection);
}

} // namespace orrery
