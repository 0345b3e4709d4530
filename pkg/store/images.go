package store

import (
	"context"
	"encoding/json"
	"fmt"

	"go.etcd.io/bbolt"

	"github.com/sandboxd/sandboxd/pkg/sandbox/record"
)

// PutImage adds an image, or moves its name:tag to it.
func (db *DB) PutImage(ctx context.Context, i record.Image) error {
	b, err := json.Marshal(i)
	if err == nil {
		err = db.commit(ctx, func(tx *bbolt.Tx) error {
			return tx.Bucket(bucketImages).Put([]byte(i.Ref()), b)
		}, nil)
	}
	if err != nil {
		return fmt.Errorf("put image %s: %w", i.Ref(), err)
	}
	return nil
}

// GetImage returns the image that name:tag is now.
func (db *DB) GetImage(_ context.Context, name, tag string) (i record.Image, ok bool, err error) {
	ref := record.Image{Name: name, Tag: tag}.Ref()
	err = db.bolt.View(func(tx *bbolt.Tx) error {
		b := tx.Bucket(bucketImages).Get([]byte(ref))
		ok = b != nil
		if !ok {
			return nil
		}
		return json.Unmarshal(b, &i)
	})
	if err != nil {
		return record.Image{}, false, fmt.Errorf("get image %s: %w", ref, err)
	}
	return i, ok, nil
}

// ListImages returns all images by name and tag. One that can not be read is
// reported and left out.
func (db *DB) ListImages(context.Context) (list []record.Image, err error) {
	err = db.bolt.View(func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketImages).ForEach(func(k, v []byte) error {
			var i record.Image
			if err := json.Unmarshal(v, &i); err != nil {
				db.log.Error("an image can not be read; build it again", "image", string(k), "err", err)
				return nil
			}
			list = append(list, i)
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	return list, nil
}

// DeleteImage takes the name from an image. It is no error if there is none.
func (db *DB) DeleteImage(ctx context.Context, name, tag string) error {
	ref := record.Image{Name: name, Tag: tag}.Ref()
	if err := db.commit(ctx, func(tx *bbolt.Tx) error {
		return tx.Bucket(bucketImages).Delete([]byte(ref))
	}, nil); err != nil {
		return fmt.Errorf("delete image %s: %w", ref, err)
	}
	return nil
}
