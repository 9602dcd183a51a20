;; Denies `openat` of paths that contain "secret", with EACCES:
;;
;;     [[rule]]
;;     call    = "openat"
;;     handler = "secret.wat"
;;
;; What was looked at is what is opened: the call gets the copy in place of the program's path, which another thread could change.
(module
  (import "orrery" "copy_from" (func $copy_from (param $argument i32) (param $offset i32) (param $to i32) (param $length i32) (result i32)))
  (import "orrery" "replace" (func $replace (param $argument i32) (param $from i32) (param $length i32) (result i32)))
  (memory 1)
  (data (i32.const 0) "secret")
  (global $path i32 (i32.const 4096))
  (global $room i32 (i32.const 4096))

  (func (export "decide") (param $call i32) (result i32)
    (local $copied i32) (local $length i32) (local $at i32) (local $same i32)
    (local.set $copied (call $copy_from (i32.const 1) (i32.const 0) (global.get $path) (global.get $room)))
    ;; An address that cannot be read: the kernel says so.
    (if (i32.lt_s (local.get $copied) (i32.const 0)) (then (return (i32.const 0))))
    ;; How long the path is. One without end is too long, -ENAMETOOLONG.
    (block $end
      (loop $next
        (if (i32.ge_u (local.get $length) (local.get $copied)) (then (return (i32.const -36))))
        (br_if $end (i32.eqz (i32.load8_u (i32.add (global.get $path) (local.get $length)))))
        (local.set $length (i32.add (local.get $length) (i32.const 1)))
        (br $next)))
    (block $clean
      (loop $next
        (br_if $clean (i32.gt_u (i32.add (local.get $at) (i32.const 6)) (local.get $length)))
        (if (i32.and
              (i32.eq (i32.load (i32.add (global.get $path) (local.get $at))) (i32.load (i32.const 0)))
              (i32.eq (i32.load16_u offset=4 (i32.add (global.get $path) (local.get $at))) (i32.load16_u (i32.const 4))))
          (then (return (i32.const -13))))
        (local.set $at (i32.add (local.get $at) (i32.const 1)))
        (br $next)))
    ;; Zero, or the error of a path for which there is no room.
    (call $replace (i32.const 1) (global.get $path) (local.get $length))))
