;; A watchdog: its program emits events of topic `custom`; where none came for three ticks, the attribute `restart` is set, and the owner is
;; notified by a message. Written by hand, to show that no compiler is needed.
(module
  (import "orrery" "subscribe" (func $subscribe (param i32 i64) (result i32)))
  (import "orrery" "set_attribute" (func $set_attribute (param i32 i64) (result i32)))
  (import "orrery" "emit" (func $emit (param i32 i32 i32) (result i32)))
  (import "orrery" "log" (func $log (param i32 i32) (result i32)))
  (import "handle" "heartbeat" (func $heartbeat (result i32)))
  (import "handle" "tick" (func $tick (result i32)))
  (import "handle" "restart" (func $restart (result i32)))
  (import "handle" "owner" (func $owner (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 0) "no heartbeat for three ticks")
  (global $beats (mut i32) (i32.const -1))
  (global $silent (mut i32) (i32.const 0))

  (func (export "start")
    (global.set $beats (call $subscribe (call $heartbeat) (i64.const 0)))
    (drop (call $subscribe (call $tick) (i64.const 100000000))))

  (func (export "event") (param $subscription i32) (param $time i64) (param $value i64) (param $detail i64)
    (if (i32.eq (local.get $subscription) (global.get $beats))
      (then (global.set $silent (i32.const 0)))
      (else
        (global.set $silent (i32.add (global.get $silent) (i32.const 1)))
        (if (i32.eq (global.get $silent) (i32.const 3))
          (then
            (drop (call $log (i32.const 0) (i32.const 28)))
            (drop (call $emit (call $owner) (i32.const 0) (i32.const 28)))
            (drop (call $set_attribute (call $restart) (i64.const 1)))))))))
