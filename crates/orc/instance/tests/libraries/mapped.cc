// Exceptions, static and thread-local objects, a thread-local variable of the C++ library.
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

static int alive;
static int *ended;
struct Counted {
    Counted() { ++alive; }
    ~Counted() {
        --alive;
        if (ended)
            ++*ended;
    }
};
static Counted counted;
static std::map<std::string, int> table = {{"first", 1}};
thread_local Counted local;
thread_local std::string text = "begin";

static int deep(int value) {
    Counted here;
    if (value > 3)
        throw std::runtime_error("more than three");
    return value + 1;
}

extern "C" {
int fails(int value) {
    try {
        return deep(value);
    } catch (const std::exception &error) {
        table["failed"]++;
        return -table["failed"] * 100 - static_cast<int>(std::string(error.what()).size());
    }
}
void escapes(int value) { deep(value); }
int catches(void (*other)(int), int value) {
    Counted here;
    try {
        other(value);
    } catch (const std::runtime_error &) {
        return 1;
    }
    return 0;
}
int living() { return alive; }
void note_end(int *place) { ended = place; }
int extend() {
    (void)&local;
    Counted *used = &local;
    text += used ? "!" : "";
    return static_cast<int>(text.size());
}
int once(int value) {
    static std::once_flag flag;
    static int got;
    std::call_once(flag, [&] { got = value; });
    return got;
}
}
