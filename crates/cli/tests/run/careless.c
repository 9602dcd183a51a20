// Takes some errors well and some not: for `orrery faults`.
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int main(void) {
    char line[100] = "";
    // Not looked at: crashes.
    FILE *file = fopen("/etc/passwd", "r");
    if (!fgets(line, sizeof line, file))
        return 3;
    int fd = open("out", O_CREAT | O_WRONLY | O_TRUNC, 0644);
    // Reported.
    if (fd < 0)
        return 4;
    // Tried again for ever: hangs, if all fail.
    while (write(fd, line, strlen(line)) < 0)
        ;
    // Not looked at: inconsistent, if somebody checks.
    (void)!ftruncate(fd, 4);
    close(fd);
    return 0;
}
