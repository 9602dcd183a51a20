#![allow(missing_docs, clippy::unwrap_used)]
use orrery_orthros::*;
use std::time::Duration;
fn main() {
    let t = std::time::Instant::now();
    let config = PairConfig {
        folder: "/tmp/orthros-lab/pair".into(),
        cache: "/tmp/orthros-lab/cache".into(),
        service: Service {
            argv: vec!["orrery-guest".into(), "count".into(), "/run/count".into()],
            files: vec![],
        },
        memory_mib: 256,
        cpus: 1,
    };
    let mut pair = Pair::up(config).unwrap();
    println!("{:?} up pid {}", t.elapsed(), pair.pid());
    println!("{}", pair.run(&["cat", "/run/count"]).unwrap());
    pair.crash("panic").unwrap();
    println!("{:?} {:?}", pair.watch(Duration::from_secs(10)), t.elapsed());
    match pair.fail_over(Cause::Panic) {
        Ok(f) => println!("{f:#?}"),
        Err(e) => {
            println!("{e}");
            println!("{}", pair.backup().unwrap().console());
            return;
        }
    }
    println!("{:?}", t.elapsed());
    println!("{}", pair.run(&["cat", "/run/count"]).unwrap());
    std::thread::sleep(Duration::from_millis(500));
    println!("{}", pair.run(&["cat", "/run/count"]).unwrap());
}
