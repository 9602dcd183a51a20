# needs: gcc g++ make cmake
# Building: a small program with make, or whole (WHOLE=1) Debian's googletest from its sources, with its samples and their tests.
if [ -n "$WHOLE" ] && [ -d /usr/src/googletest ]; then
    cmake -S /usr/src/googletest/googletest -B b -DCMAKE_BUILD_TYPE=Release -Dgtest_build_samples=ON > log 2>&1; echo $?
    make -s -C b -j2 >> log 2>&1; echo $?
    for sample in b/sample*_unittest; do "$sample"; done | sed 's/ ([0-9]* ms[a-z ]*)//'
    find b -name '*.o' -o -name '*.a' -o -name 'sample*_unittest' | LC_ALL=C sort | xargs cksum
    rm -rf b log
    exit
fi
for i in 1 2 3 4; do
    echo "int f$i(int x) { return x * $i + __builtin_popcount(x); }" > f$i.c
done
cat > main.c <<'END'
#include <stdio.h>
int f1(int), f2(int), f3(int), f4(int);
int main(void) { printf("%d\n", f1(5) + f2(6) + f3(7) + f4(8)); return 42; }
END
cat > Makefile <<'END'
program: main.o f1.o f2.o f3.o f4.o ; $(CC) -o $@ $^
%.o: %.c ; $(CC) -O2 -g -pipe -c $<
END
make -s -j2 && ./program; echo $?
echo 'int main(void) { return undeclared; }' > f1.c; make -s f1.o; echo $?
cksum main.o f2.o program
