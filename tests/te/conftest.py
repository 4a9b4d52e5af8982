from tests.te_cpu.conftest import stand_in as stand_in
