raise ValueError("this file is not used")
