"""What breaks first in a narrow dtype, and what to keep in float32."""
