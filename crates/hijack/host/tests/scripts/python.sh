# needs: /usr/bin/python3 /usr/lib/python3.11/test/test_os.py
# CPython's own tests of what stands nearest to the kernel: the same tests pass, fail and are skipped.
# Whole, all of five modules; else what is quick of them.
run() {
    module=$1; shift
    # What waits for a connection that a virtual machine cannot make to itself waits for ever, natively, too.
    /usr/bin/python3 -m test.regrtest -v -u none -i ThreadedVSOCKSocketStreamTest --timeout 600 "$@" "$module" > said 2>&1; echo "$module $?"
    # What a test prints itself may stand between its name and its result.
    grep -oE '^test_[A-Za-z0-9_]+ \([A-Za-z0-9_.]+\)' said | LC_ALL=C sort | cksum
    grep -E '^(FAIL|ERROR): |^Ran [0-9]+ tests? in |^(OK|FAILED)( |$)' said | sed 's/ in .*//' | LC_ALL=C sort
    grep -oE 'skipped .*' said | LC_ALL=C sort
    rm -f said
}
if [ -n "$WHOLE" ]; then
    for module in test_os test_subprocess test_socket test_threading test_signal; do run $module; done
else
    run test_os
    run test_signal -m 'test_pthread*' -m 'test_sigwait' -m 'test_raise*' -m 'PidfdSignalTest' -m 'test_stress_delivery_sim*'
    run test_threading -m 'BarrierTests' -m 'test_main_thread_after_fork*'
    run test_subprocess -m 'test_communicate' -m 'test_communicate_pipe*' -m 'test_preexec*' -m 'test_send_signal' -m 'test_swap*'
    run test_socket -m 'BasicTCPTest' -m 'BasicUDPTest' -m 'RecvmsgIntoSCMRightsStreamTest' -m 'SendfileUsingSendfileTest'
fi
