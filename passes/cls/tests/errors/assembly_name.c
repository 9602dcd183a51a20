// EXPECT: assembly_name.c:5:5: {{.*}}cannot move variable state{{.*}}assembly code uses it by name
int state = 1;
int read_state(void) {
    int of;
    __asm__("movl state(%%rip), %0" : "=r"(of));
    return of;
}
