/*
 * Where libraries are loaded. Relocated data are equal in two processes only where libraries are at equal addresses. The store
 * has a book for each trust domain that says where a library, known by its first bytes, is: at addresses that no stranger
 * knows, as the book begins at random. The book is memory that all may read, so that looking something up costs no question.
 *
 * The loader asks the kernel for any address, and the kernel takes the highest gap that is large enough. So before a library is
 * opened all gaps above the book's addresses are filled with memory that nobody can touch and that takes none, and one hole is
 * left: where the library is to be. When the loader is done the rest is unmapped again. Where something else falls into the
 * hole the library is elsewhere, and its relocated data are its own.
 *
 * A region of its own costs a process page tables, so only libraries with much to share are placed.
 */
#define _GNU_SOURCE
#include <sys/mman.h>

#include "parts.h"

/* Bytes of relocated data from which on a library is worth a place: page tables take about as much. */
#define WORTH_A_PLACE (32UL << 10)
/* What is left free above the filling for the loader's own small mappings; smaller libraries would fall into it. */
#define LEFT_FREE (256UL << 10)
/* What of a file's beginning is its key: the headers, and the build ID that linkers put behind them. */
#define KEY_BYTES 2048
#define MOST_PLACED 256
#define MOST_OCCUPIED 512
#define MOST_FILLINGS 32

/* As in book.rs. */
struct book {
    uint64_t start, end, slots, zero;
    struct {
        uint64_t key, address, end, zero;
    } slot[];
};

struct library {
    uint64_t key;
    size_t length, alignment;
    uint64_t relocated, relocated_length;
};

static const struct book *book;
static int without_book;
/* From where to where places are, as the index or the book has it. */
static struct range span;
/* What is filled: the book's own part, with the occupied ranges left out, and gaps above it. */
static struct range filled;
static struct range fillings[MOST_FILLINGS];
static size_t filling_count;
/* What must never be unmapped, in the order of addresses: libraries in their places, and what fell into holes. */
static struct range occupied[MOST_OCCUPIED];
static size_t occupied_count;
/* The hole that was made last, and the place in it. */
static struct range hole, wanted;
static struct placed placed[MOST_PLACED];
static size_t count;

size_t placed_count(void) { return count; }
struct placed *placed_at(size_t index) {
    return &placed[index];
}
void forget_placed(size_t index) { placed[index] = placed[--count]; }

/* ---- the library ---- */

static uint64_t key_of(const char *bytes, uint64_t size) {
    uint64_t hash = mix(1, size);
    for (size_t i = 0; i < KEY_BYTES; i += 8) {
        uint64_t word;
        copy(&word, bytes + i, 8);
        hash = mix(hash, word);
    }
    return hash ? hash : 1;
}

/* No program has addresses above it. */
#define MOST_ADDRESS (1ull << 56)

/* Reads what has to be known of a library before it is mapped; whether it is one, and worth a place. */
static int examine(int fd, uint64_t size, struct library *library) {
    char bytes[KEY_BYTES] __attribute__((aligned(8)));
    long got = CALL6(SYS_pread64, fd, bytes, sizeof bytes, 0, 0, 0);
    const ElfW(Ehdr) *header = (const void *)bytes;
    if (got < (long)sizeof bytes || !same(header->e_ident, ELFMAG, SELFMAG) ||
        header->e_ident[EI_CLASS] != ELFCLASS64 || header->e_type != ET_DYN ||
        header->e_phentsize != sizeof(ElfW(Phdr)) || header->e_phoff % 8 || header->e_phoff > sizeof bytes ||
        header->e_phnum * sizeof(ElfW(Phdr)) > sizeof bytes - header->e_phoff)
        return 0;
    const ElfW(Phdr) *segment = (const void *)(bytes + header->e_phoff);
    uintptr_t end = 0;
    *library = (struct library){key_of(bytes, size), 0, PAGE, 0, 0};
    for (size_t i = 0; i < header->e_phnum; i++, segment++) {
        if (segment->p_vaddr > MOST_ADDRESS || segment->p_memsz > MOST_ADDRESS)
            return 0; /* No sum of the two overflows below it. */
        if (segment->p_type == PT_LOAD) {
            if (!end && segment->p_vaddr >= PAGE)
                return 0; /* It wants an address of its own. */
            end = segment->p_vaddr + segment->p_memsz;
            if (segment->p_align > PAGE)
                return 0; /* The loader maps more than it needs, and takes its choice. */
        } else if (segment->p_type == PT_GNU_RELRO) {
            /* The loader protects whole pages only. */
            library->relocated = segment->p_vaddr & -PAGE;
            uint64_t until = (segment->p_vaddr + segment->p_memsz) & -PAGE;
            library->relocated_length = until > library->relocated ? until - library->relocated : 0;
        }
    }
    library->length = (end + PAGE - 1) & -PAGE;
    library->alignment = library->length >= HUGE ? HUGE : PAGE;
    return library->length > LEFT_FREE && library->relocated_length >= WORTH_A_PLACE;
}

/* ---- the book ---- */

static int open_book(const struct library *library) {
    struct room wish = {library->key, library->length, library->alignment};
    uint64_t length = 0;
    struct exchange exchange = {.body = &wish, .length = sizeof wish, .told = &length, .room = sizeof length};
    if (!may_share() || is_without_places() || !ask_store(&exchange, ASK_BOOK, TOLD_BOOK) ||
        exchange.descriptor_count != 1)
        return 0;
    int fd = exchange.descriptors[0];
    if (!book) {
        long place = CALL6(SYS_mmap, NULL, length, PROT_READ, MAP_SHARED, fd, 0);
        if (!has_failed(place))
            book = (const struct book *)place;
        if (book && (length < sizeof *book || book->slots * sizeof *book->slot + sizeof *book > length ||
                     !book->slots || book->slots & (book->slots - 1)))
            book = NULL;
        if (book)
            span = (struct range){book->start, book->end};
    }
    close_file(fd);
    return book != NULL;
}

static uint64_t look_up(uint64_t key) {
    uint64_t words[KEY_WORDS] = {KEY_PLACE, key};
    struct entry entry;
    if (find_entry(words, &entry)) {
        span = span_of_places();
        return entry.value[0];
    }
    for (uint64_t i = 0; book && i < book->slots; i++) {
        uint64_t at = (key + i) & (book->slots - 1);
        uint64_t found = __atomic_load_n(&book->slot[at].key, __ATOMIC_ACQUIRE);
        if (found == key)
            return book->slot[at].address;
        if (!found)
            return 0;
    }
    return 0;
}

static uint64_t address_of(const struct library *library) {
    uint64_t address = look_up(library->key);
    if (!address && !without_book) {
        without_book = !open_book(library);
        address = look_up(library->key);
    }
    int good = address > span.start && address < span.end && address % library->alignment == 0 &&
               library->length + HUGE <= span.end - address;
    return good ? address : 0;
}

/* ---- the filling ---- */

static int is_empty(struct range range) { return range.start >= range.end; }

static int fill(struct range range) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    if (is_empty(range))
        return 1;
    long at = CALL6(SYS_mmap, range.start, range.end - range.start, PROT_NONE, flags, -1, 0);
    if (!has_failed(at) && at != (long)range.start) /* Kernels before 4.17 take the address for a hint. */
        CALL3(SYS_munmap, at, range.end - range.start, 0);
    return at == (long)range.start;
}

static void unmap(struct range range) {
    if (!is_empty(range))
        CALL3(SYS_munmap, range.start, range.end - range.start, 0);
}

static void occupy(struct range range) {
    size_t at = occupied_count++;
    for (; at > 0 && occupied[at - 1].start > range.start; at--)
        occupied[at] = occupied[at - 1];
    occupied[at] = range;
}

static void vacate(uintptr_t start) {
    for (size_t i = 0; i < occupied_count; i++)
        if (occupied[i].start == start) {
            for (occupied_count--; i < occupied_count; i++)
                occupied[i] = occupied[i + 1];
        }
}

/* Does something to all of the filled part that is not occupied; how far it came. */
static uintptr_t around_occupied(struct range range, int (*act)(struct range)) {
    uintptr_t next = range.start;
    for (size_t i = 0; i <= occupied_count && next < range.end; i++) {
        uintptr_t until = i < occupied_count ? occupied[i].start : range.end;
        if (until > range.end)
            until = range.end;
        if (next < until && !act((struct range){next, until}))
            return next;
        if (i < occupied_count && occupied[i].end > next)
            next = occupied[i].end;
    }
    return range.end;
}

static int unfill(struct range range) {
    unmap(range);
    return 1;
}

/* Fills the book's part, up to the lowest of what is above. */
static int fill_book(uintptr_t end) {
    struct range part = {span.start, end};
    uintptr_t reached = around_occupied(part, fill);
    if (reached == end) {
        filled = part;
        return 1;
    }
    around_occupied((struct range){part.start, reached}, unfill);
    return 0;
}

/* Fills every gap above the first place in which something of this length would be put. */
static int fill_gaps(size_t size) {
    while (filling_count < MOST_FILLINGS) {
        long at = CALL6(SYS_mmap, NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (has_failed(at))
            return 0;
        struct range gap = {(uintptr_t)at, (uintptr_t)at + size};
        fillings[filling_count++] = gap;
        /* The kernel seeks from below, or has no room above. */
        if (gap.start < span.end)
            return 0;
        if (fill_book(gap.start)) {
            /* Small things get a place of their own. */
            unmap((struct range){gap.end - LEFT_FREE, gap.end});
            fillings[filling_count - 1].end -= LEFT_FREE;
            return 1;
        }
    }
    return 0;
}

/* Where the kernel would map the file now. */
static uintptr_t try_mapping(int fd, size_t length) {
    long at = CALL6(SYS_mmap, NULL, length, PROT_READ, MAP_PRIVATE, fd, 0);
    if (has_failed(at))
        return 0;
    CALL3(SYS_munmap, at, length, 0);
    return (uintptr_t)at;
}

/* Fills up what the loader has left of the hole. */
static void close_hole(void) {
    if (is_empty(hole))
        return;
    if (fill(hole)) { /* Nothing was put into it. */
        vacate(wanted.start);
        count -= count && placed[count - 1].start == wanted.start + placed[count - 1].name.start;
    } else {
        struct range rests[] = {{hole.start, wanted.start}, {wanted.end, hole.end}};
        for (size_t i = 0; i < 2; i++)
            if (!fill(rests[i]))
                occupy(rests[i]);
    }
    hole = wanted = (struct range){0, 0};
}

/* Makes a hole into which the file will be mapped at `start`; whether it will, as far as that is known before. */
static int make_hole(int fd, uintptr_t start, size_t length) {
    struct range exact = {start, start + length};
    struct range padded = {start - PAGE, start - PAGE + length + HUGE};
    int is_long = length >= HUGE && start % HUGE == 0;
    hole = is_long ? padded : exact;
    unmap(hole);
    /* There is no other gap for it. If it goes elsewhere all the same the hole is closed when the next one is made. */
    if (!is_long)
        return 1;
    /* Some file systems have long mappings begin at multiples of 2 MiB: for that the kernel seeks a gap so much longer,
       and takes the first multiple in it that is not its beginning. */
    if (try_mapping(fd, length) == start)
        return 1;
    if (fill((struct range){hole.start, start}) && fill((struct range){exact.end, hole.end})) {
        hole = exact;
        return try_mapping(fd, length) == start;
    }
    return 0;
}

int may_have_place(uint64_t size) {
    return size > LEFT_FREE && !is_without_places() && !is_left_alone() && count < MOST_PLACED &&
           occupied_count + 4 <= MOST_OCCUPIED;
}

void prepare_place(int fd, uint64_t size) {
    struct library library;
    if (examine(fd, size, &library)) {
        uintptr_t start = address_of(&library);
        struct range place = {start, start + library.length};
        int is_free = start != 0;
        for (size_t i = 0; i < occupied_count; i++)
            is_free &= occupied[i].end <= place.start || place.end <= occupied[i].start;
        if (is_free && (!is_empty(filled) || fill_gaps(library.length + HUGE))) {
            close_hole();
            occupy(place);
            wanted = place;
            placed[count++] = (struct placed){
                {library.key, start, library.relocated, library.relocated_length},
                start + library.relocated,
                library.relocated_length,
                0,
            };
            if (!make_hole(fd, start, library.length))
                close_hole();
        }
    }
}

void finish_places(void) {
    close_hole();
    around_occupied(filled, unfill);
    for (size_t i = 0; i < filling_count; i++)
        unmap(fillings[i]);
    filling_count = 0;
    filled = (struct range){0, 0};
}

void note_closed(uintptr_t base) {
    vacate(base);
    for (size_t i = 0; i < count; i++)
        if (placed[i].name.address == base)
            forget_placed(i--);
}
