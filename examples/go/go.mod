module orrery.example/words

go 1.19
