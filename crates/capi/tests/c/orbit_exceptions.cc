// What a task throws is reported by type and what(), in C++ and in init functions; what it catches is its own affair.
#include "check_orbit.h"

#include <exception>
#include <stdexcept>
#include <string>

namespace {

struct Odd {
    int number;
};
struct Base {
    virtual ~Base() {}
    long padding;
};
struct Late : Base, std::runtime_error {
    Late() : std::runtime_error("too late, and not the first base") {}
};

// A destructor that runs would be one that ran after main was told.
struct Guard {
    bool armed;
    ~Guard() {
        if (armed)
            _exit(9);
    }
};

long task(void *argument, void *) {
    int what = *static_cast<int *>(argument);
    Guard guard = {what <= 6};
    try {
        if (what == 1)
            throw std::out_of_range("row 7 of 5");
        if (what == 2)
            throw 5L;
        if (what == 3)
            throw Odd();
        if (what == 4)
            throw Late();
        if (what == 5)
            std::string("x").at(3);
    } catch (const std::invalid_argument &) {
        guard.armed = false;
        return -2;
    }
#if __cplusplus >= 201103L
    if (what == 6) {
        std::exception_ptr kept;
        try {
            throw std::logic_error("thrown again");
        } catch (...) {
            kept = std::current_exception();
        }
        std::rethrow_exception(kept);
    }
#endif
    try {
        throw what;
    } catch (int caught) {
        return caught * 10;
    }
}

void *failing_init() { throw std::runtime_error("no table"); }

void fails(orrery_orbit *orbit, int what, const char *wanted) {
    errno = 0;
    CHECK(orrery_orbit_call(orbit, 0, NULL, &what, sizeof what) == -1 && errno == ESRCH);
    if (!strstr(orrery_last_error(), wanted))
        dprintf(2, "wanted: %s\n", wanted);
    CHECK(strstr(orrery_last_error(), wanted));
}

} // namespace

int main() {
    orrery_orbit_options options = ORRERY_ORBIT_OPTIONS_INIT;
    options.restart = ORRERY_ORBIT_RESTART_ON_CRASH;
    options.backoff_longest_ms = 1;
    orrery_orbit *orbit = orrery_orbit_create_with("thrower", task, NULL, &options);
    CHECK(orbit);
    fails(orbit, 1, "C++ exception std::out_of_range: row 7 of 5");
    fails(orbit, 2, "C++ exception long");
    fails(orbit, 3, "C++ exception (anonymous namespace)::Odd");
    fails(orbit, 4, "Late: too late, and not the first base");
    fails(orbit, 5, "C++ exception std::out_of_range: basic_string::at");
#if __cplusplus >= 201103L
    fails(orbit, 6, "C++ exception std::logic_error: thrown again");
#endif
    int calm = 7;
    CHECK(orrery_orbit_call(orbit, 0, NULL, &calm, sizeof calm) == 70);
    CHECK(orrery_orbit_destroy(orbit) == 0);

    CHECK(!orrery_orbit_create_with("failing", task, failing_init, &options));
    CHECK(strstr(orrery_last_error(), "C++ exception std::runtime_error: no table"));
    return 0;
}
