// Compartment-local storage (CLS): one copy of a library's code serves many instances whose state is apart.
//
// Every writable variable of a module is moved to sections of its own, and every use of it becomes `address + delta`,
// where delta is a thread-local word: the distance from the library's own copy of the state to that of the instance
// which the thread has entered. On request, loads and stores are relative to the base of GS instead, which is the same
// distance. With delta 0 the library is an ordinary one. After "ORC: Increasing Cloud Memory Density
// via Object Reuse with Capabilities" (Sartakov et al., OSDI 2023), section 2.3 of the slides, whose `_cls_get_addr` is
// an addition here.
//
// What the sections contain is the interface to the loader: see runtime/cls.h.
#ifndef ORRERY_PASSES_CLS_H
#define ORRERY_PASSES_CLS_H

#include "llvm/ADT/DenseMap.h"
#include "llvm/ADT/SetVector.h"
#include "llvm/IR/Constants.h"
#include "llvm/IR/IRBuilder.h"
#include "llvm/IR/Module.h"

namespace orrery {

/// Where the state of an instance is.
constexpr const char *DataSection = "orrery_cls_data";
constexpr const char *BssSection = "orrery_cls_bss";
/// The initial values of thread-local variables, which are state as well: they may point to state.
constexpr const char *ThreadSection = "orrery_cls_tls";
/// Variables that all instances share, by request.
constexpr const char *SharedSection = "orrery_cls_shared";
constexpr const char *SharedBssSection = "orrery_cls_shared_bss";
constexpr const char *UnitSection = "orrery_cls_units";
constexpr const char *ConstructorSection = "orrery_cls_ctors";
constexpr const char *DestructorSection = "orrery_cls_dtors";

/// The thread-local word that holds the distance.
constexpr const char *ThreadWord = "__orrery_cls_thread";

/// The annotation by which a variable stays out: `__attribute__((annotate("cls_shared")))`.
constexpr const char *SharedAnnotation = "cls_shared";

/// The end of the name by which other units of the library find a variable that was moved. The variable's own name comes first, also in the order
/// of nm(1): configure scripts look there for what the compiler puts before names.
constexpr const char *MovedSuffix = ".orrery_cls_in";

inline std::string movedName(llvm::StringRef Name) { return (Name + MovedSuffix).str(); }

inline bool isMovedName(llvm::StringRef Name) {
    return Name.take_back(llvm::StringRef(MovedSuffix).size()) == MovedSuffix;
}

inline bool hasPrefix(llvm::StringRef Name, llvm::StringRef Prefix) {
    return Name.take_front(Prefix.size()) == Prefix;
}

/// Which variables of a module are state.
class Selection {
  public:
    explicit Selection(llvm::Module &M);

    /// Variables that this module defines, which become state; in the order of the module.
    const llvm::SetVector<llvm::GlobalVariable *> &moved() const { return Moved; }
    /// Thread-local variables, which become one per thread and instance.
    const llvm::SetVector<llvm::GlobalVariable *> &threadLocal() const { return ThreadLocal; }
    /// Variables that all instances share, by request.
    const llvm::SetVector<llvm::GlobalVariable *> &shared() const { return Shared; }

    bool isMoved(const llvm::GlobalVariable *G) const {
        return Moved.count(const_cast<llvm::GlobalVariable *>(G));
    }
    bool isThreadLocal(const llvm::GlobalVariable *G) const {
        return ThreadLocal.count(const_cast<llvm::GlobalVariable *>(G));
    }
    /// Whether another unit defines the variable, and so may have moved it: that is known when they are linked.
    bool isForeign(const llvm::GlobalVariable *G) const;
    /// Whether the constant has the address of a variable in it that is, or may be, state.
    bool refers(llvm::Constant *C);

  private:
    void readAnnotations(llvm::Module &M);
    bool canMove(const llvm::GlobalVariable &G) const;
    /// Whether the module's constants may point to state through it.
    bool pointsToState(llvm::Constant *C, llvm::DenseMap<llvm::Constant *, bool> &Known);

    llvm::SetVector<llvm::GlobalVariable *> Moved, ThreadLocal, Shared;
    llvm::DenseMap<llvm::Constant *, bool> Known;
};

/// Replaces every use of state in functions by the address in the current instance. Reports what it cannot replace.
void rewriteUses(llvm::Module &M, Selection &Chosen);

/// Whether accesses are relative to GS where they can be: `ORRERY_CLS_BASE=gs`.
bool usesSegment();

/// Reports an error where the module has accesses that are relative to GS already.
void rejectSegment(llvm::Module &M);

/// Has loads and stores at a constant offset from the distance use GS, whose base is the distance, too. This is done when
/// all else is, so that optimizers see ordinary addresses. Where an address is computed or passed on, it stays one.
void rewriteAccesses(llvm::Module &M);

/// Gives the variables their sections, and the names by which other units find them.
void placeVariables(llvm::Module &M, Selection &Chosen);

/// Makes constructors, destructors, allocations and threads those of an instance.
void redirectCalls(llvm::Module &M);
void collectConstructors(llvm::Module &M);

/// Records that this unit was built with the pass.
void recordUnit(llvm::Module &M, const Selection &Chosen);

/// Reports an error at a place of the source, after which the compiler makes no output.
void reportError(const llvm::Instruction &At, const llvm::Twine &Message);
void reportError(const llvm::Module &M, const llvm::GlobalValue &Of, const llvm::Twine &Message);

} // namespace orrery

#endif
