// Containers in areas, and structures whose watched fields are.
#include "check_orbit.h"
#include <map>
#include <string>
#include <vector>

typedef orrery::area_allocator<int> ints;
typedef std::vector<int, ints> vector;
typedef std::pair<const int, long> entry;
typedef std::map<int, long, std::less<int>, orrery::area_allocator<entry>> map;

struct fields {
    long version;
    long *lock;
    fields() : version(3), lock(0) {}
};

struct transaction : orrery::delegating<fields> {
    long &version;
    long *&lock;
    char much_more[4000];
    explicit transaction(orrery_area *area)
        : orrery::delegating<fields>(area), version(delegate()->version), lock(delegate()->lock) {}
};

struct arguments {
    const vector *numbers;
    const map *table;
    const fields *transaction;
};

static long look(void *argbuf, void *) {
    const arguments *argument = static_cast<const arguments *>(argbuf);
    long sum = argument->transaction->version + *argument->transaction->lock;
    for (vector::const_iterator at = argument->numbers->begin(); at != argument->numbers->end(); ++at)
        sum += *at;
    for (map::const_iterator at = argument->table->begin(); at != argument->table->end(); ++at)
        sum += at->first * at->second;
    return sum;
}

int main() {
    orrery_area *area = orrery_area_create(1 << 16);
    orrery_orbit *looker = orrery_orbit_create("looker", look, NULL);
    CHECK(area && looker);
    ints allocator(area);
    void *place = orrery_area_alloc(area, sizeof(vector));
    vector *numbers = new (place) vector(allocator);
    map *table = new (orrery_area_alloc(area, sizeof(map))) map(std::less<int>(), allocator);
    transaction one(area);
    one.lock = static_cast<long *>(orrery_area_alloc(area, sizeof(long)));
    *one.lock = 1000;
    CHECK(orrery_area_contains(area, one.delegate()) && one.delegate()->version == 3);
    long expected = 1003;
    arguments argument = {numbers, table, one.delegate()};
    for (int round = 0; round < 200; round++) {
        numbers->push_back(round);
        (*table)[round] = 2;
        one.version = round;
        expected = 1000 + round;
        for (int number = 0; number <= round; number++)
            expected += number + 2 * number;
        CHECK(orrery_orbit_call(looker, 1, &area, &argument, sizeof argument) == expected);
    }
    table->~map();
    numbers->~vector();
    CHECK(orrery_area_free(area, numbers) == 0 && orrery_area_free(area, table) == 0);
    CHECK(orrery_orbit_destroy(looker) == 0);
    return 0;
}
