// Static objects, guard variables, virtual functions, exceptions, inline variables, templates, thread_local objects.
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <typeinfo>
#include <vector>

struct Base {
    virtual ~Base() = default;
    virtual std::string name() const { return "base"; }
};
struct Derived : Base {
    static int made;
    Derived() { made++; }
    std::string name() const override { return "derived"; }
};
int Derived::made;
static Derived object;
static Base *pointer = &object;
static std::map<std::string, int> table = {{"one", 1}, {"two", 2}};
inline std::vector<int> numbers = {1, 2, 3};
template <class T> struct Count {
    static T value;
    static std::string text;
};
template <class T> T Count<T>::value = T(4);
template <class T> std::string Count<T>::text = "a text that is too long for the object itself";

static std::string &lazily() {
    static std::string text = "made " + std::to_string(Derived::made);
    return text;
}
struct Ends {
    ~Ends() { std::cout << "ends " << numbers.size() << std::endl; }
};
static Ends ends;
thread_local std::string local = "local";
struct Failure : std::runtime_error {
    using runtime_error::runtime_error;
};
static void fail(int n) {
    if (n == 0)
        throw Failure("failed");
    fail(n - 1);
}

int main() {
    numbers.push_back(4);
    table["three"] = 3;
    Count<int>::value += 1;
    lazily() += "!";
    try {
        fail(3);
    } catch (const Failure &failure) {
        std::cout << failure.what() << " " << typeid(*pointer).name() << std::endl;
    }
    local += " main";
    std::thread([] {
        local += " thread";
        std::cout << local << std::endl;
    }).join();
    std::cout << pointer->name() << " " << table.size() << " " << numbers.size() << " " << Count<int>::value
              << " " << Count<long>::text << " " << lazily() << " " << local << std::endl;
    return dynamic_cast<Derived *>(pointer) ? 0 : 1;
}
