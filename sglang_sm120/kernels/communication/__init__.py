"""Operations across the GPUs of one host, a process for each GPU."""
