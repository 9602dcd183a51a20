/* Every function of orrery/instance.h that is about mapped libraries, with the library that is named first. */
#include <orrery/instance.h>
#include <string.h>

#include "../check_program.h"

enum { MANY = 200 };

static int number(struct orrery_instance_mapped *instance, const char *name) {
    void *address = orrery_instance_mapped_symbol(instance, name);
    CHECK(address);
    int (*function)(void);
    memcpy(&function, &address, sizeof function);
    return function();
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    struct orrery_instance_mapped_options options = ORRERY_INSTANCE_MAPPED_OPTIONS_INIT;
    FAILS(!orrery_instance_mapped_load("/nowhere", NULL), ENOENT);
    FAILS(!orrery_instance_mapped_load(argv[0], NULL), ENOEXEC);
    FAILS(!orrery_instance_mapped_load(NULL, NULL), EINVAL);
    options.unwind = 9;
    FAILS(!orrery_instance_mapped_load(argv[1], &options), EINVAL);
    options.unwind = ORRERY_INSTANCE_UNWIND_ALWAYS;
    options.reserved = 1;
    FAILS(!orrery_instance_mapped_load(argv[1], &options), EINVAL);
    options.reserved = 0;
    options.size = 0;
    FAILS(!orrery_instance_mapped_load(argv[1], &options), EINVAL);
    options.size = sizeof options;
    struct orrery_instance_mapped_library *library = orrery_instance_mapped_load(argv[1], &options);
    CHECK(library);
    FAILS(!orrery_instance_mapped_create(NULL), EINVAL);

    struct orrery_instance_mapped *one = orrery_instance_mapped_create(library);
    struct orrery_instance_mapped *two = orrery_instance_mapped_create(library);
    CHECK(one && two);
    FAILS(!orrery_instance_mapped_symbol(one, "absent"), ENOENT);
    FAILS(!orrery_instance_mapped_symbol(NULL, "next"), EINVAL);
    FAILS(!orrery_instance_mapped_symbol(one, NULL), EINVAL);
    CHECK(number(one, "next") == 1 && number(one, "next") == 2 && number(two, "next") == 1);
    CHECK(number(one, "next_local") == 5 && number(one, "next_local") == 6 && number(two, "next_local") == 5);
    int *counter = (int *)orrery_instance_mapped_symbol(one, "counter");
    CHECK(counter && *counter == 3 && counter != orrery_instance_mapped_symbol(two, "counter"));
    CHECK(!orrery_instance_mapped_base(NULL) &&
          orrery_instance_mapped_base(one) != orrery_instance_mapped_base(two));
    CHECK(!memcmp(orrery_instance_mapped_base(one), "\177ELF", 4));

    CHECK(number(one, "start_waiting") == 0);
    FAILS(orrery_instance_mapped_destroy(one) == -1, EBUSY);
    CHECK(number(one, "end_waiting") == 0);

    int ended = 0;
    void *address = orrery_instance_mapped_symbol(two, "note_end");
    void (*note_end)(int *);
    memcpy(&note_end, &address, sizeof note_end);
    note_end(&ended);
    CHECK(orrery_instance_mapped_destroy(two) == 0 && ended == 1);
    CHECK(number(one, "next") == 3);

    struct orrery_instance_mapped *many[MANY];
    for (int i = 0; i < MANY; i++)
        CHECK((many[i] = orrery_instance_mapped_create(library)));
    orrery_instance_mapped_close(library);
    orrery_instance_mapped_close(NULL);
    for (int round = 1; round < 4; round++)
        for (int i = 0; i < MANY; i++)
            CHECK(number(many[i], "next") == round);
    for (int i = 0; i < MANY; i++)
        CHECK(orrery_instance_mapped_destroy(many[i]) == 0);
    CHECK(orrery_instance_mapped_destroy(one) == 0 && orrery_instance_mapped_destroy(NULL) == 0);
    return 0;
}
