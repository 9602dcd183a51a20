/* The two ways to serve: all connections in one memory, or each in a session of its own. */
#ifndef SERVER_H
#define SERVER_H

/* Longest line that a client may send. */
enum { LINE = 512 };

/* Serves until the program is ended. */
void serve_plainly(int listener);
void serve_in_sessions(int listener, unsigned ready, unsigned most);

#endif
