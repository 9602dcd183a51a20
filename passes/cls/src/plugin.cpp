// The plug-in: `clang -fpass-plugin=orrery-cls.so`, as orrery-cc calls it.
#include "cls.h"

#include "llvm/Config/llvm-config.h"
#include "llvm/IR/PassManager.h"
#include "llvm/Passes/PassBuilder.h"
#include "llvm/Passes/PassPlugin.h"

using namespace llvm;

namespace {

/// The module flag of a module that the pass has seen.
constexpr const char *Done = "orrery.cls";

struct ClsPass : PassInfoMixin<ClsPass> {
    static bool isRequired() { return true; }

    PreservedAnalyses run(Module &M, ModuleAnalysisManager &) {
        if (M.getModuleFlag(Done)) {
            M.getContext().emitError(
                M.getSourceFileName() +
                ": cannot move variables to compartment-local storage: they were moved already; "
                "run the pass once");
            return PreservedAnalyses::all();
        }
        if (!hasSupportedTarget(M)) {
            M.getContext().emitError(
                M.getSourceFileName() +
                ": cannot move variables to compartment-local storage: the target is not x86-64 "
                "Linux");
            return PreservedAnalyses::all();
        }
        M.addModuleFlag(Module::Max, Done, 1);
        if (orrery::usesSegment())
            orrery::rejectSegment(M);
        orrery::collectConstructors(M);
        orrery::Selection Chosen(M);
        orrery::rewriteUses(M, Chosen);
        orrery::placeVariables(M, Chosen);
        orrery::redirectCalls(M);
        orrery::recordUnit(M, Chosen);
        return PreservedAnalyses::none();
    }

    static bool hasSupportedTarget(const Module &M) {
        StringRef Triple(M.getTargetTriple());
        return Triple.take_front(6) == "x86_64" && Triple.contains("linux");
    }
};

/// The last pass of all.
struct ClsAccessPass : PassInfoMixin<ClsAccessPass> {
    static bool isRequired() { return true; }

    PreservedAnalyses run(Module &M, ModuleAnalysisManager &) {
        if (!orrery::usesSegment())
            return PreservedAnalyses::all();
        orrery::rewriteAccesses(M);
        return PreservedAnalyses::none();
    }
};

} // namespace

extern "C" LLVM_ATTRIBUTE_WEAK PassPluginLibraryInfo llvmGetPassPluginInfo() {
    return {LLVM_PLUGIN_API_VERSION, "orrery-cls", "1", [](PassBuilder &Builder) {
                Builder.registerPipelineStartEPCallback(
                    [](ModulePassManager &Passes, auto...) { Passes.addPass(ClsPass()); });
                Builder.registerOptimizerLastEPCallback(
                    [](ModulePassManager &Passes, auto...) { Passes.addPass(ClsAccessPass()); });
                // For opt(1): -passes=orrery-cls.
                Builder.registerPipelineParsingCallback(
                    [](StringRef Name, ModulePassManager &Passes, ArrayRef<PassBuilder::PipelineElement>) {
                        if (Name != "orrery-cls")
                            return false;
                        Passes.addPass(ClsPass());
                        return true;
                    });
            }};
}
