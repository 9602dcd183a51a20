javac -d "$CACHE" "$PROGRAMS/Program.java"
