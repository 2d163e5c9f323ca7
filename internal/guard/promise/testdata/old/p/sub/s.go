package sub

type T struct{ F int }
