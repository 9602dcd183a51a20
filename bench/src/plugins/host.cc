// Loads the plug-ins that its arguments name, one after the other, and prints how many nanoseconds of CPU time all the calls of
// dlopen(3) took.
#include <cstdio>
#include <ctime>
#include <dlfcn.h>

static long long now() {
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

int main(int count, char **arguments) {
    long long took = 0;
    for (int i = 1; i < count; i++) {
        long long begin = now();
        void *plugin = dlopen(arguments[i], RTLD_NOW);
        took += now() - begin;
        auto run = plugin ? reinterpret_cast<int (*)(int)>(dlsym(plugin, "plugin_run")) : nullptr;
        if (!run || run(3) < 0) {
            std::fprintf(stderr, "%s: %s\n", arguments[i], dlerror());
            return 1;
        }
    }
    std::printf("%lld\n", took);
    return 0;
}
