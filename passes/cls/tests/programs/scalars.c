/* Globals, static locals, arrays, structures; common, weak and aliased symbols. */
#include <stdio.h>

int counter;
static long total = 5;
int common[4];
__attribute__((weak)) int weak = 7;
int original = 3;
extern int also __attribute__((alias("original")));
static struct {
    int a;
    char name[8];
} both = {1, "one"};
char large[100000];

static int next(void) {
    static int n = 10;
    return n++;
}

int main(void) {
    for (int i = 0; i < 4; i++) {
        counter += i;
        total *= 2;
        common[i] += counter;
        large[i * 20000] = (char)('a' + i);
    }
    also += 4;
    weak++;
    both.name[0] = 'O';
    printf("%d %ld %d %d %d %d\n", counter, total, common[3], weak, original, next() + next());
    printf("%s %d %c%c\n", both.name, both.a, large[0], large[60000]);
    return 0;
}
