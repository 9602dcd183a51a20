/* Variables that stay out. */
#include <stdio.h>
__attribute__((annotate("cls_shared"))) int all = 1;
static __attribute__((annotate("cls_shared"))) int zero;
int one = 2;
int main(void) {
    all++;
    zero += all;
    one += zero;
    __asm__("addl $1, %0" : "+m"(one));
    printf("%d %d %d\n", all, zero, one);
    return 0;
}
