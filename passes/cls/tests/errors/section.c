// EXPECT: section.c: cannot move variable entry {{.*}}it is in section own_section by request
__attribute__((section("own_section"), used)) int entry = 1;
