# needs: gcc make
# Building: a small program with make, or whole (WHOLE=1) Debian's libxcrypt from its sources, tests included.
if [ -n "$WHOLE" ] && [ -d /usr/src/libxcrypt ] && command -v autoreconf libtoolize > /dev/null; then
    cp -r /usr/src/libxcrypt x && cd x && export SOURCE_DATE_EPOCH=1 TZ=UTC
    (autoreconf -fi && ./configure --disable-static --quiet) > ../log 2>&1; echo $?
    make -s -j2 >> ../log 2>&1; echo $?
    make -s -j2 check >> ../log 2>&1; echo $?
    grep -E '^# (PASS|FAIL|XFAIL|ERROR|SKIP)' ../log; find . -name '*.o' | LC_ALL=C sort | xargs cksum
    cd .. && rm -rf x log
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
