# Behind all of it.

    orrery_step {end}
.pushsection .rodata.orrery_steps,"a",@progbits
.globl orrery_steps_end
.hidden orrery_steps_end
orrery_steps_end:
.popsection
.popsection
