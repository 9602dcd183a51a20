javac -d "$CACHE" "$PROGRAMS/Pool.java"
