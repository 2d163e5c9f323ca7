// Engine is the least program with an engine: what a program with an engine links at least.
package main

import (
	"context"
	"fmt"

	"github.com/serviceplane/serviceplane/nftables"
	"github.com/serviceplane/serviceplane/proxier"
)

func main() {
	p, err := nftables.New(nftables.Config{}, proxier.Deps{})
	if err == nil {
		err = p.Run(context.Background())
	}
	fmt.Println(err)
}
