// Static objects, guard variables, thread_local objects, exceptions.
#include <map>
#include <stdexcept>
#include <string>

static std::map<std::string, int> table = {{"first", 1}};
static int alive;
struct Counted {
    Counted() { ++alive; }
    ~Counted() { --alive; }
};
static Counted counted;
thread_local std::string local = "begin";

extern "C" int put(const char *key, int value) {
    table[key] = value;
    return static_cast<int>(table.size());
}
extern "C" int lazily() {
    static std::string made = "made with " + std::to_string(table.size());
    return static_cast<int>(made.back() - '0');
}
extern "C" int extend() {
    local += "!";
    return static_cast<int>(local.size());
}
extern "C" int fails(int value) {
    try {
        if (value > 3)
            throw std::runtime_error("more than three");
        return value;
    } catch (const std::exception &) {
        table["failed"]++;
        return -table["failed"];
    }
}
