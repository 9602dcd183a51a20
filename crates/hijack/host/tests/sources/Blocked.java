// Two threads that wait: for input, and for somebody who never comes.
public class Blocked {
    static int reads() throws java.io.IOException {
        return System.in.read();
    }

    static void waits(Object lock) {
        synchronized (lock) {
            try {
                lock.wait();
            } catch (InterruptedException interrupted) {
                System.out.println(interrupted);
            }
        }
    }

    public static void main(String[] words) throws Exception {
        Thread waiter = new Thread(() -> waits(new Object()), "waiter");
        waiter.setDaemon(true);
        waiter.start();
        while (waiter.getState() != Thread.State.WAITING) Thread.sleep(1);
        System.out.println("ready");
        System.exit(reads() + 1);
    }
}
