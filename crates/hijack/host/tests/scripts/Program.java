import java.io.*;
import java.net.*;
import java.nio.file.*;
import java.util.*;
import java.util.concurrent.*;

public class Program {
    static int depth(int level) {
        return depth(level + 1) + 1;
    }

    public static void main(String[] words) throws Exception {
        ExecutorService pool = Executors.newFixedThreadPool(8);
        List<Future<Integer>> sums = new ArrayList<>();
        for (int i = 0; i < 64; i++) {
            final int start = i;
            sums.add(pool.submit(() -> {
                int sum = start;
                for (int j = 0; j < 20000; j++) sum += new int[] {j % 7}.clone()[0];
                return sum;
            }));
        }
        long total = 0;
        for (Future<Integer> sum : sums) total += sum.get();
        System.out.println(total);
        pool.shutdown();
        ServerSocket server = new ServerSocket(0, 5, InetAddress.getLoopbackAddress());
        Thread serving = new Thread(() -> {
            try (Socket client = server.accept()) {
                client.getOutputStream().write("hello\n".getBytes());
            } catch (IOException error) {
                System.out.println(error);
            }
        });
        serving.start();
        try (Socket socket = new Socket(InetAddress.getLoopbackAddress(), server.getLocalPort())) {
            System.out.println(new BufferedReader(new InputStreamReader(socket.getInputStream())).readLine());
        }
        serving.join();
        for (int i = 0; i < 3; i++) {
            Process child = new ProcessBuilder("sh", "-c", "echo child; exit 3").redirectErrorStream(true).start();
            System.out.println(new String(child.getInputStream().readAllBytes()).trim() + " " + child.waitFor());
        }
        try {
            String nothing = null;
            nothing.length();
        } catch (NullPointerException error) {
            System.out.println("null");
        }
        try {
            depth(0);
        } catch (StackOverflowError error) {
            System.out.println("too deep");
        }
        for (int i = 0; i < 100; i++) {
            byte[] garbage = new byte[1 << 20];
            garbage[i] = 1;
        }
        System.gc();
        Path file = Files.createTempFile(Path.of("."), "java", "text");
        Files.writeString(file, "data");
        System.out.println(Files.size(file));
        Files.delete(file);
        Thread sleeper = new Thread(() -> {
            try {
                Thread.sleep(60000);
            } catch (InterruptedException interrupted) {
                System.out.println("interrupted");
            }
        });
        sleeper.start();
        sleeper.interrupt();
        sleeper.join();
        System.exit(5);
    }
}
