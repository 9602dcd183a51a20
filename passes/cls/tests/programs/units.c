/* Two units: state that the other one has, and variables of the C library. UNITS: units_other.c */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

extern int elsewhere;
extern int elsewhere_weak __attribute__((weak));
extern int nowhere __attribute__((weak));
extern int *const elsewhere_pointer;
extern int elsewhere_alias;
int here = 1;
int *to_elsewhere = &elsewhere;
static int *const constant_to_elsewhere = &elsewhere;
void other(void);

int main(void) {
    elsewhere++;
    *to_elsewhere += 10;
    *constant_to_elsewhere += 100;
    elsewhere_alias += 1000;
    other();
    printf("%d %d %d %d %d\n", here, elsewhere, *elsewhere_pointer, &nowhere == NULL, elsewhere_weak);
    setenv("ORRERY_CLS_TEST", "x", 1);
    int found = 0;
    for (char **e = environ; *e; e++)
        found += **e == 'O';
    fprintf(stdout, "%d %d\n", found > 0, optind);
    return 0;
}
