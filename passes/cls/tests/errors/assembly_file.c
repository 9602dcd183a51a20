// EXPECT: assembly_file.c: cannot move variable state {{.*}}assembly code at file scope uses it
int state = 1;
__asm__(".globl address\naddress: .quad state");
