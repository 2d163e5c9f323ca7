package sub

type T struct{ F string }
