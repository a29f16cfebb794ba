"""For every test: one torch thread. With more, the threads of several processes on few cores wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
