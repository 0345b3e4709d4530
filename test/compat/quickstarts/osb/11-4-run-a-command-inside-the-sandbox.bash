osb command run <sandbox-id> -o raw -- python -c "print(1 + 1)"
