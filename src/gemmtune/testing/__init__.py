"""What a test of gemmtune, or of something plugged into it, needs: a simulated clock and planted wrong kernels."""
