# Reports the GPUs of a node, and the files of "$@" that the node lacks.
echo "$SLURMD_NODENAME ${CUDA_VISIBLE_DEVICES:--}"
for file in "$@"; do
    for second in 1 2 3 4 5; do test -e "$file" && continue 2; sleep 1; done
    echo "$SLURMD_NODENAME lacks $file"
done
