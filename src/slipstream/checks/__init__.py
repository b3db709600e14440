"""What a run is watched for: hangs, values that are not finite, ranks that drift apart."""
