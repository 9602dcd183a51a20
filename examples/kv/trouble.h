/* Bugs on order, to see that an orbit's are not the server's. */
#ifndef KV_TROUBLE_H
#define KV_TROUBLE_H

#include "slice.h"

enum trouble {
    TROUBLE_NONE,
    TROUBLE_CRASH,  /* a write to where nothing is */
    TROUBLE_ASSERT, /* a failed assertion */
    TROUBLE_EXIT,   /* a library that calls exit(3) */
    TROUBLE_HANG,   /* waits for what never comes */
    TROUBLE_SPIN,   /* an endless loop */
    TROUBLE_MEMORY, /* takes all that there is */
    TROUBLE_LIE     /* pushes back what is not so */
};

bool trouble_named(struct slice name, enum trouble *trouble);

/* In an orbit: makes that trouble. Returns from TROUBLE_NONE and TROUBLE_LIE. */
void trouble_make(enum trouble trouble);

#endif
