// C++ objects, exceptions and containers are as they were, and destructors run once for each state that goes
// on.
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"

namespace {

int destroyed;

struct Guard {
    ~Guard() { ++destroyed; }
};

int rounds_through_exceptions() {
    std::vector<std::string> words;
    words.push_back("a word that is too long to be stored in place");
    std::map<int, std::string> numbers;
    orrery_rollback_snapshot_t start = 0;
    int got = orrery_rollback_snapshot(&start);
    CHECK(got >= 0);
    CHECK(words.size() == 1 && numbers.empty() && destroyed == 0);
    try {
        Guard guard;
        for (int i = 0; i < 1000; i++) {
            words.push_back(std::string(static_cast<size_t>(i), 'x'));
            numbers[i * 7919 % 1000] = words.back();
        }
        words[0].clear();
        throw std::runtime_error("out of here");
    } catch (const std::runtime_error &error) {
        CHECK(destroyed == 1 && std::string("out of here") == error.what());
        // In the midst of a handler: the exception in flight goes with the state.
        if (got < 50)
            orrery_rollback_resume(start, got + 1);
    }
    CHECK(words.size() == 1001 && numbers.size() == 1000);
    return got;
}

} // namespace

int main() {
    CHECK(rounds_through_exceptions() == 50);
    CHECK(destroyed == 1);
    return 0;
}
