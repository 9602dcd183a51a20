// A plug-in as C++ programs have them: classes, containers, text and an exception. With LARGE it has regular expressions, too, which
// are templates of the standard library, so that its file has 190 KiB in place of 28.
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {
struct Shape {
    virtual ~Shape() = default;
    virtual double area() const = 0;
    virtual std::string name() const = 0;
};

struct Square : Shape {
    double side;
    explicit Square(double length) : side(length) {}
    double area() const override { return side * side; }
    std::string name() const override { return "square"; }
};

struct Circle : Shape {
    double radius;
    explicit Circle(double length) : radius(length) {}
    double area() const override { return 3.14159 * radius * radius; }
    std::string name() const override { return "circle"; }
};
} // namespace

// The benchmark writes another number into each copy, so that no two files are equal.
extern "C" const char plugin_number[16] = "NUMBER 00000000";

extern "C" int plugin_run(int count) {
    std::map<std::string, std::vector<std::unique_ptr<Shape>>> shapes;
    for (int i = 0; i < count; i++) {
        std::unique_ptr<Shape> one;
        if (i % 2)
            one = std::make_unique<Circle>(i);
        else
            one = std::make_unique<Square>(i);
        shapes[one->name()].push_back(std::move(one));
    }
    std::ostringstream text;
    for (const auto &[name, all] : shapes)
        for (const auto &one : all)
            text << name << ' ' << one->area() << '\n';
    try {
        if (text.str().empty())
            throw std::runtime_error("no shapes");
    } catch (const std::exception &) {
        return -1;
    }
    return static_cast<int>(text.str().size());
}

#ifdef LARGE
#include <regex>

extern "C" int plugin_match(const char *text) {
    std::regex expression("([a-z]+)=([0-9]+)");
    std::smatch found;
    std::string string(text);
    return std::regex_match(string, found, expression);
}
#endif
