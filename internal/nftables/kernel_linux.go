package nftables

import (
	"context"

	"github.com/serviceplane/serviceplane/internal/nft"
)

// kernel is the engine's access to nf_tables, an *nft.Conn.
type kernel interface {
	Commit(ctx context.Context, b *nft.Batch) error
	Dump(ctx context.Context, b *nft.Batch, reset func(), each func(attrs []byte)) error
	Query(ctx context.Context, b *nft.Batch, each func(message int, attrs []byte)) error
	// Port is the address of the socket. Notifications name it as the origin of a change.
	Port() uint32
	Close() error
}
