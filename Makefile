# Orrery's front door. `make help` lists what it can do; everything else first runs scripts/bootstrap,
# which installs what is missing and otherwise does nothing.

CARGO := scripts/cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)

# Every program in bench/src/bin measures something, except this one.
BENCHES := $(sort $(filter-out promises,$(basename $(notdir $(wildcard bench/src/bin/*.rs)))))

# Names the program that runs each test program, here one that ends it should it hang.
ONE_TEST := CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER

# The compilers that the pass is for, as far as they are installed; `make test` tries the first, `make soak` all.
CLS_LLVMS = $(strip $(foreach version,14 15 16 17 18 19,$(if $(and $(wildcard /usr/bin/clang-$(version)),$(wildcard \
    /usr/lib/llvm-$(version)/include/llvm/IR/Module.h)),$(version))))
CLS_LLVM = $(firstword $(CLS_LLVMS))

# The package of another kernel for pairs of machines, beside that of this release.
OTHER_KERNEL := linux-image-6.12-cloud-amd64

MDBOOK_VERSION := 0.5.4
MDBOOK := $(TARGET)/tools/bin/mdbook

# Nothing is built twice in continuous integration: what a second build would reuse only costs time there.
ifdef CI
export CARGO_INCREMENTAL := 0
endif

# Set if `make run` shows instances of SQLite: named by D, or with all the rest.
SHOWS_INSTANCES = $(filter instances,$(or $(D),instances))

.DEFAULT_GOAL := help
.PHONY: help bootstrap bootstrap-run run build install uninstall deb rpm image dist test fuzz check bench bench-known bench-build compare promises docs soak fmt clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  benchmarks: $(BENCHES)"

bootstrap: ## install what is missing to build Orrery
	@scripts/bootstrap

run: bootstrap-run ## build what it shows, then show all five systems at work, a screen each: D='NAME ...' for some
	@# A pair of machines is shown where QEMU is; elsewhere the tour names what it lacks.
	$(CARGO) build --release --locked -p orrery-cli -p orrery-manager -p orrery-warm $(if $(SHOWS_INSTANCES),$(if $(CLS_LLVM),-p orrery-capi)) $(if $(shell command -v qemu-system-x86_64),-p orrery-orthros-guest)
	@$(if $(filter-out instances,$(or $(D),all)),$(TARGET)/release/orrery demo $(filter-out instances,$(D)))
	@$(if $(D),,$(TARGET)/release/orrery manager demo)
	@$(if $(SHOWS_INSTANCES),$(if $(CLS_LLVM),$(MAKE) --no-print-directory -s -C examples/instances run,echo 'SKIPPED: instances: there is no clang of 14 to 19 with the headers of LLVM'))

# What is installed is built by who may build, and installed by who may install: `make build && sudo make install`.
BUILD := $(TARGET)/dist
INSTALLED := -p orrery-cli -p orrery-capi -p orrery-manager -p orrery-orc-registry -p orrery-warm -p orrery-warm-http -p orrery-orthros-guest -p orrery-orthros-load -p orrery-orthros-preload -p orrery-signer
export PREFIX DESTDIR BINDIR LIBEXECDIR MODULEDIR LIBDIR INCLUDEDIR DATADIR MANDIR UNITDIR

# What is looked for when a recipe is read has to be there before it is.
bootstrap-run:
	@scripts/bootstrap --only run

build: bootstrap ## build what `make install` installs
	$(CARGO) build --profile dist --locked $(INSTALLED)

install: $(if $(wildcard $(BUILD)/liborrery_signer.a),,build) ## install into PREFIX=/usr/local, below DESTDIR
	packaging/stage '$(abspath $(BUILD))' '$(abspath $(TARGET))/stage'
	packaging/install '$(abspath $(BUILD))' '$(abspath $(TARGET))/stage'

deb: build ## Debian packages of what `make install` installs, in target/deb
	@scripts/bootstrap deb
	packaging/deb '$(abspath $(BUILD))' '$(abspath $(TARGET))/deb'
	lintian --allow-root --fail-on error,warning '$(abspath $(TARGET))'/deb/*.changes

rpm: build ## RPM packages of the same, in target/rpm
	packaging/rpm '$(abspath $(BUILD))' '$(abspath $(TARGET))/rpm'

image: deb ## a container image of the packages: IMAGE=orrery, BASE=debian:bookworm-slim, ENGINE=docker, podman or buildah
	packaging/image '$(abspath $(TARGET))/deb' '$(or $(IMAGE),orrery)'

dist: ## a source archive of what is committed, target/orrery-VERSION.tar.gz
	packaging/dist '$(abspath $(TARGET))'

uninstall: ## remove what `make install` put there
	packaging/install --uninstall '$(abspath $(BUILD))' '$(abspath $(TARGET))/stage'

test: check ## formatting, lints, documentation without warnings, all tests
	@# The C library and the programs that tests start, which no test would have built.
	$(CARGO) build --workspace --locked
	$(ONE_TEST)='timeout --foreground --kill-after=10 12m' \
	    scripts/bounded 70m $(CARGO) test --workspace --locked --no-fail-fast
	@$(if $(CLS_LLVM),,echo 'SKIPPED: the compiler pass: there is no clang of 14 to 19 with the headers of LLVM' >&2)
	$(if $(CLS_LLVM),scripts/bounded 10m $(MAKE) --no-print-directory -C passes/cls test BUILD='$(abspath $(TARGET))/debug/cls' LLVM='$(CLS_LLVM)')
	CARGO_TARGET_DIR='$(abspath $(TARGET))/fuzz' $(CARGO) test --release --manifest-path fuzz/Cargo.toml --locked
	@# The same inputs each time, so that a failure can be had again.
	scripts/bounded 15m scripts/fuzz --stable --seed 1

fuzz: bootstrap ## fuzz the parsers of others' bytes: T='NAME ...', S=SECONDS of each; INPUT=FILE tries that again
	@$(if $(INPUT),scripts/fuzz --again $(T) $(abspath $(INPUT)),scripts/fuzz --seconds $(or $(S),20) $(T))

check: bootstrap ## the part of `make test` that runs no test
	$(CARGO) fmt --all --check
	$(CARGO) fmt --manifest-path fuzz/Cargo.toml --check
	scripts/c-format
	scripts/circles
	scripts/links
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	CARGO_TARGET_DIR='$(abspath $(TARGET))/fuzz' $(CARGO) clippy --release --manifest-path fuzz/Cargo.toml --all-targets --all-features --locked -- -D warnings
	RUSTDOCFLAGS=-Dwarnings $(CARGO) doc --workspace --no-deps --locked

bench: bench-known bench-build ## measure beside the rivals: all, or one with B=NAME; QUICK=1 takes 45 s each
	@failed=; \
	for bench in $(or $(B),$(BENCHES)); do \
	    QUICK='$(QUICK)' $(TARGET)/release/$$bench || failed="$$failed $$bench"; \
	done; \
	if [ -n "$$failed" ]; then echo "make bench: failed:$$failed" >&2; exit 1; fi

bench-known:
	@unknown='$(filter-out $(BENCHES),$(B))'; \
	if [ -n "$$unknown" ]; then \
	    echo "make bench: no benchmark is called $$unknown; there are: $(BENCHES)" >&2; exit 2; \
	fi

bench-build: bootstrap
	$(CARGO) build --release --locked -p orrery-bench -p orrery-capi -p orrery-signer -p orrery-cli -p orrery-manager -p orrery-warm -p orrery-orthros-guest -p orrery-orthros-load

compare: bootstrap ## measure this tree and OLD=REVISION in turn: B=NAME, ROUNDS=6, SECONDS=15
	@[ -n "$(OLD)" ] || { echo "make compare: OLD=REVISION is missing" >&2; exit 2; }
	scripts/compare $(addprefix --bench ,$(B)) --rounds $(or $(ROUNDS),6) --seconds $(or $(SECONDS),15) '$(OLD)'

promises: bench-build ## check the bounds of bench/promises.toml; WRITE=1 writes docs/measurements/DATE.md
	QUICK='$(QUICK)' $(TARGET)/release/promises $(if $(WRITE),--write)

docs: bootstrap ## the book (docs/book) and the interfaces' reference (target/doc)
	RUSTDOCFLAGS=-Dwarnings $(CARGO) doc --workspace --no-deps --locked
	@[ "$$($(MDBOOK) --version 2>/dev/null)" = "mdbook v$(MDBOOK_VERSION)" ] || \
	    $(CARGO) install --locked --root $(TARGET)/tools mdbook@$(MDBOOK_VERSION)
	$(MDBOOK) build docs

soak: bootstrap ## the long tests: RUNS=1000000 rollbacks, CASES=5000 random programs, MODULES=1000000 extensions, CRASHES=50 kernels (SEED=1)
	@scripts/bootstrap soak deb
	scripts/left-behind save '$(abspath $(TARGET))/soak/before.json'
	scripts/sanitize
	scripts/miri
	ORRERY_RUNS=$(or $(RUNS),1000000) scripts/bounded 60m \
	    $(CARGO) test --release --locked -p orrery-rollback --test rollback -- runs_leave_nothing_behind
	ORRERY_CASES=$(or $(CASES),5000) scripts/bounded 60m \
	    $(CARGO) test --release --locked -p orrery-memory --test space_model
	ORRERY_CONTEXTS=4095 scripts/bounded 20m \
	    $(CARGO) test --release --locked -p orrery-context --test contexts -- hundreds_live_at_a_time
	ORRERY_REQUESTS=100000 scripts/bounded 20m \
	    $(CARGO) test --release --locked -p orrery-context --test contexts -- snapshots_in_a_row_do_not_add_up
	ORRERY_MODULES=$(or $(MODULES),1000000) ORRERY_SEED=$(or $(SEED),1) scripts/bounded 60m \
	    $(CARGO) test --release --locked -p orrery-extension --test random_modules
	ORRERY_WHOLE=1 scripts/bounded 60m $(MAKE) --no-print-directory -C passes/cls test BUILD='$(abspath $(TARGET))/debug/cls' LLVM='$(CLS_LLVMS)'
	ORRERY_CASES=200 ORRERY_WHOLE=1 scripts/bounded 40m \
	    $(CARGO) test --locked -p orrery-orc-instance --test sqlite --test known
	$(CARGO) build --locked -p orrery-capi
	ORRERY_WHOLE=1 scripts/bounded 200m $(CARGO) test --locked -p orrery-capi --test suites --test ffmpeg -- --nocapture
	$(CARGO) build --locked -p orrery-cli
	ORRERY_WHOLE=1 scripts/bounded 70m $(CARGO) test --locked -p orrery-hijack --test programs
	scripts/bounded 20m $(CARGO) test --locked -p orrery-hijack --test stacks
	ORRERY_CASES=200 scripts/bounded 70m $(CARGO) test --locked -p orrery-hijack --test fuzz
	$(CARGO) build --release --locked -p orrery-cli
	ORRERY_HAMMERINGS=500 scripts/bounded 60m \
	    $(CARGO) test --release --locked -p orrery-hijack --test rewriting -- rewriting
	ORRERY_STEPS=1 scripts/bounded 70m $(CARGO) test --locked -p orrery-hijack --test steps
	ORRERY_STEPS=1 scripts/bounded 70m $(CARGO) test --locked -p orrery-cli --test orc -- kills steps
	$(CARGO) build --locked -p orrery-cli -p orrery-manager -p orrery-warm -p orrery-orthros-guest -p orrery-orthros-load
	ORRERY_FAULTS=1 ORRERY_KILLS=$(or $(KILLS),500) ORRERY_REQUESTS=$(or $(REQUESTS),100000) scripts/bounded 150m \
	    $(CARGO) test --locked -p orrery-cli --test servers
	ORRERY_FAULTS=1 scripts/bounded 20m $(CARGO) test --locked -p orrery-vault --test shared -- failing
	ORRERY_DATABASE=1 scripts/bounded 20m $(CARGO) test --locked -p orrery-cli --test orthros_rescue -- database
	ORRERY_SERVICES=1 scripts/bounded 20m $(CARGO) test --locked -p orrery-cli --test orthros_units
	ORRERY_SERVICES=1 scripts/bounded 30m $(CARGO) test --locked -p orrery-cli --test orthros_services
	ORRERY_TRANSFERS=20 scripts/bounded 20m $(CARGO) test --locked -p orrery-cli --test orthros_transfer
	ORRERY_GUEST_KERNEL='$(OTHER_KERNEL)' scripts/bounded 90m $(CARGO) test --locked -p orrery-cli --test orthros \
	    --test orthros_memory --test orthros_network --test orthros_programs --test orthros_rescue --test orthros_settings \
	    --test orthros_transfer
	ORRERY_WHOLE=1 scripts/bounded 20m $(CARGO) test --locked -p orrery-cli --test units
	$(CARGO) build --release --locked -p orrery-cli -p orrery-orthros-guest -p orrery-orthros-load
	ORRERY_INSTANTS=5 scripts/bounded 20m \
	    $(CARGO) test --release --locked -p orrery-orthros-images -- after_each_instruction
	for kinds in panic,oops,oom,nmi,hang,spin,lockup 'panic --strict'; do \
	    scripts/bounded 60m $(TARGET)/release/orrery orthros soak --kinds $$kinds --crashes $(or $(CRASHES),50) \
	        --seed $(or $(SEED),1) --record $(TARGET)/soak-$${kinds%% *}.jsonl || exit 1; \
	done
	$(MAKE) --no-print-directory deb rpm
	for suite in bookworm trixie; do \
	    scripts/bounded 20m scripts/bare-machine --suite $$suite --packages '$(abspath $(TARGET))/deb' || exit 1; \
	    scripts/bounded 40m scripts/bare-machine --suite $$suite --packages '$(abspath $(TARGET))/deb' --recipes || exit 1; \
	done
	scripts/bounded 150m scripts/bare-machine
	scripts/left-behind check '$(abspath $(TARGET))/soak/before.json'

fmt: bootstrap ## give all sources their shape
	$(CARGO) fmt --all
	$(CARGO) fmt --manifest-path fuzz/Cargo.toml
	scripts/c-format --fix

clean: ## remove what was built, except the tools of `make docs`
	rm -rf docs/book
	@# Objects of a store that was killed while a test or a benchmark ran are immutable.
	@[ ! -d $(TARGET) ] || chattr -R -f -i $(TARGET) 2>/dev/null || true
	@[ ! -d $(TARGET) ] || find $(TARGET) -mindepth 1 -maxdepth 1 ! -name tools -exec rm -rf {} +
