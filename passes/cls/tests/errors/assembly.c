// EXPECT: assembly.c:5:5: {{.*}}assembly code wants its address as a constant
static int state;
int read_state(void) {
    int *at;
    __asm__("lea %c1(%%rip), %0" : "=r"(at) : "i"(&state));
    return *at + state++;
}
