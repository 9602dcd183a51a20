import java.util.*;
import java.util.concurrent.*;

/** Threads that start programs at the same time: each waits in a vfork while the others start theirs. */
public class Pool {
    static final int THREADS = 100;

    /** What the programs that one thread starts print, and how they end. */
    static String start(int thread, int programs) throws Exception {
        StringBuilder text = new StringBuilder();
        for (int i = 0; i < programs; i++) {
            Process silent = new ProcessBuilder("/bin/true").start();
            Process child = new ProcessBuilder("/bin/echo", thread + "." + i).start();
            text.append(new String(child.getInputStream().readAllBytes()).trim());
            text.append(' ').append(child.waitFor()).append(silent.waitFor()).append(' ');
        }
        return text.toString();
    }

    public static void main(String[] words) throws Exception {
        int programs = Integer.parseInt(words[0]);
        ExecutorService pool = Executors.newFixedThreadPool(THREADS);
        CountDownLatch ready = new CountDownLatch(THREADS);
        List<Future<String>> texts = new ArrayList<>();
        for (int i = 0; i < THREADS; i++) {
            final int thread = i;
            texts.add(pool.submit(() -> {
                ready.countDown();
                ready.await();
                return start(thread, programs);
            }));
        }
        int failed = 0;
        for (Future<String> text : texts) {
            try {
                System.out.println(text.get());
            } catch (ExecutionException error) {
                System.out.println(error.getCause());
                failed++;
            }
        }
        pool.shutdown();
        System.exit(failed == 0 ? 7 : 1);
    }
}
