/* More state than is copied. */
char large[1 << 20] = "a";
static char *const end = large + (1 << 20) - 1;
static char **const to_end = (char **)&end;
char at(int place) { return large[place]; }
void put(int place, char value) { large[place] = value; }
void put_last(char value) { **to_end = value; }
