/*
 * What the loader of 32-bit programs finds in the auditor's place: an auditor that wants nothing (la_version in rtld-audit(7)). Without it
 * that loader would complain about the auditor of another processor each time.
 */
unsigned int la_version(unsigned int version) {
    (void)version;
    return 0;
}
